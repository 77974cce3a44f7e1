#include <dlfcn.h>
#include <vulkan/vulkan_core.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ggml-vulkan.h"
#include "llama_cpp_accelerator_options.h"
#include "third_party/llama_cpp/accelerator.h"

namespace {

// Opened when it is needed: linked in, its absence would end the program before it could say so.
PFN_vkGetInstanceProcAddr Loader() {
  static const auto loader = [] {
    void* const library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
    return library == nullptr ? nullptr
                              : reinterpret_cast<PFN_vkGetInstanceProcAddr>(
                                    dlsym(library, "vkGetInstanceProcAddr"));
  }();
  return loader;
}

template <typename Function>
Function Find(VkInstance instance, const char* name) {
  return reinterpret_cast<Function>(vkGetInstanceProcAddr(instance, name));
}

}  // namespace

// The one function of Vulkan that ggml calls by name; it finds all others through it.
extern "C" VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance,
                                                                          const char* name) {
  const PFN_vkGetInstanceProcAddr loader = Loader();
  return loader == nullptr ? nullptr : loader(instance, name);
}

namespace meshnet::llama_cpp {

const char kLane[] = "vulkan";

absl::string_view AcceleratorBuild() { return kAcceleratorOptions; }

absl::Status CheckDriver() {
  constexpr uint32_t kNeeded = VK_API_VERSION_1_2;
  const auto version = Find<PFN_vkEnumerateInstanceVersion>(nullptr, "vkEnumerateInstanceVersion");
  uint32_t found = 0;
  if (version != nullptr && version(&found) == VK_SUCCESS && found >= kNeeded) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      Loader() == nullptr
          ? "expected Vulkan's loader libvulkan.so.1, it cannot be opened; install it and the "
            "hardware's driver (Debian: libvulkan1, mesa-vulkan-drivers or the vendor's)"
          : absl::StrCat("expected Vulkan 1.2 or newer, the loader offers ",
                         VK_API_VERSION_MAJOR(found), ".", VK_API_VERSION_MINOR(found)));
}

ggml_backend_reg_t AcceleratorBackend() { return ggml_backend_vk_reg(); }

void DescribeDevice(size_t, AcceleratorDevice* device) {
  // ggml tells neither driver nor kind: ask for the device of that name.
  VkApplicationInfo application = {};
  application.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO;
  application.apiVersion = VK_API_VERSION_1_2;
  VkInstanceCreateInfo create = {};
  create.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO;
  create.pApplicationInfo = &application;
  VkInstance instance = nullptr;
  // What cannot be looked at is no hardware that anything could be said of.
  device->software = true;
  device->driver = "unknown";
  if (Find<PFN_vkCreateInstance>(nullptr, "vkCreateInstance")(&create, nullptr, &instance) !=
      VK_SUCCESS) {
    return;
  }
  const auto enumerate =
      Find<PFN_vkEnumeratePhysicalDevices>(instance, "vkEnumeratePhysicalDevices");
  const auto describe =
      Find<PFN_vkGetPhysicalDeviceProperties2>(instance, "vkGetPhysicalDeviceProperties2");
  uint32_t count = 0;
  std::vector<VkPhysicalDevice> found;
  if (enumerate(instance, &count, nullptr) == VK_SUCCESS) {
    found.resize(count);
    if (enumerate(instance, &count, found.data()) < 0) found.clear();
  }
  for (VkPhysicalDevice physical : found) {
    VkPhysicalDeviceDriverProperties driver = {};
    driver.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_DRIVER_PROPERTIES;
    VkPhysicalDeviceProperties2 properties = {};
    properties.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PROPERTIES_2;
    properties.pNext = &driver;
    describe(physical, &properties);
    if (device->description != properties.properties.deviceName) continue;
    device->driver = absl::StrCat(driver.driverName, " ", driver.driverInfo);
    device->software = properties.properties.deviceType != VK_PHYSICAL_DEVICE_TYPE_DISCRETE_GPU &&
                       properties.properties.deviceType != VK_PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU &&
                       properties.properties.deviceType != VK_PHYSICAL_DEVICE_TYPE_VIRTUAL_GPU;
    break;
  }
  Find<PFN_vkDestroyInstance>(instance, "vkDestroyInstance")(instance, nullptr);
}

}  // namespace meshnet::llama_cpp

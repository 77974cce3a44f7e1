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
void* Library() {
  static void* const library = dlopen("libvulkan.so.1", RTLD_NOW | RTLD_LOCAL);
  return library;
}

// One of the loader's own functions. Null where there is no loader.
template <typename Function>
Function Exported(const char* name) {
  return Library() == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(Library(), name));
}

template <typename Function>
Function Find(VkInstance instance, const char* name) {
  return reinterpret_cast<Function>(vkGetInstanceProcAddr(instance, name));
}

}  // namespace

// The functions of Vulkan that ggml calls by name; it finds all others through the first.
extern "C" {

VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetInstanceProcAddr(VkInstance instance,
                                                               const char* name) {
  static const auto loader = Exported<PFN_vkGetInstanceProcAddr>("vkGetInstanceProcAddr");
  return loader == nullptr ? nullptr : loader(instance, name);
}

// Not called before CheckDriver() has found the loader.
VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL vkGetDeviceProcAddr(VkDevice device, const char* name) {
  static const auto loader = Exported<PFN_vkGetDeviceProcAddr>("vkGetDeviceProcAddr");
  return loader(device, name);
}

VKAPI_ATTR void VKAPI_CALL vkGetPhysicalDeviceFeatures2(VkPhysicalDevice device,
                                                        VkPhysicalDeviceFeatures2* features) {
  static const auto loader =
      Exported<PFN_vkGetPhysicalDeviceFeatures2>("vkGetPhysicalDeviceFeatures2");
  loader(device, features);
}

VKAPI_ATTR void VKAPI_CALL vkCmdCopyBuffer(VkCommandBuffer commands, VkBuffer source,
                                           VkBuffer target, uint32_t count,
                                           const VkBufferCopy* regions) {
  static const auto loader = Exported<PFN_vkCmdCopyBuffer>("vkCmdCopyBuffer");
  loader(commands, source, target, count, regions);
}

}  // extern "C"

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
      Library() == nullptr
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

// The engine on its lane's accelerator keeps the contract of every engine, and says what it runs
// on.
#include <memory>
#include <string>

#include "cc/shard_engine/contract_test_suite.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/shard_engine/llama/testing/contract_options.h"
#include "cc/shard_engine/llama/testing/tiny_llama.h"
#include "gtest/gtest.h"
#include "third_party/llama_cpp/accelerator.h"

namespace meshnet {
namespace {

const std::string& Model() {
  static const auto* path = new std::string([] {
    std::string tiny = testing::TempDir() + "/accelerated.gguf";
    EXPECT_TRUE(WriteTinyLlama(tiny).ok());
    return tiny;
  }());
  return *path;
}

EngineUnderTest Accelerated() {
  EngineUnderTest engine;
  engine.name = "Accelerated";
  engine.model_layers = 6;
  const auto device = llama_cpp::FindAcceleratorDevice("");
  engine.evidence = device.ok() && device->software ? Evidence::kFixture : Evidence::kDark;
  engine.make = [](const ContractConfig& config) {
    return LoadLlamaEngine(ContractOptions(config, Model()));
  };
  return engine;
}

INSTANTIATE_TEST_SUITE_P(Lane, EngineContractTest, testing::Values(Accelerated()), NameOf);

std::string Field(const Capability& capability, const std::string& name) {
  for (const auto& [field, value] : capability.recipe) {
    if (field == name) return value;
  }
  return "";
}

TEST(AcceleratorTest, TheRecipeNamesLaneDeviceDriverAndBuild) {
  const auto device = llama_cpp::FindAcceleratorDevice("");
  ASSERT_TRUE(device.ok()) << device.status();
  const auto engine = LoadLlamaEngine(ContractOptions({}, Model()));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const Capability& c = (*engine)->capability();
  EXPECT_NE(std::string(llama_cpp::kLane), "cpu");
  EXPECT_EQ(Field(c, "backend"), llama_cpp::kLane);
  EXPECT_EQ(Field(c, "accelerator"), device->description);
  EXPECT_EQ(Field(c, "accelerator_driver"), device->driver);
  EXPECT_FALSE(device->driver.empty());
  EXPECT_THAT(Field(c, "build_options"),
              testing::HasSubstr(std::string(llama_cpp::AcceleratorBuild())));
}

TEST(AcceleratorTest, OnTheCpuTheSameProgramHasTheRecipeOfTheCpu) {
  LlamaEngineOptions options = ContractOptions({}, Model());
  const auto fast = LoadLlamaEngine(options);
  options.device = "cpu";
  const auto plain = LoadLlamaEngine(options);
  ASSERT_TRUE(fast.ok() && plain.ok()) << fast.status() << plain.status();
  EXPECT_EQ(Field((*plain)->capability(), "backend"), "cpu");
  EXPECT_EQ(Field((*plain)->capability(), "accelerator"), "");
  EXPECT_NE((*plain)->capability().recipe_fingerprint, (*fast)->capability().recipe_fingerprint);
}

TEST(AcceleratorTest, ADeviceThatIsNotThereIsRefusedWithThoseThatAre) {
  const auto device = llama_cpp::FindAcceleratorDevice("");
  ASSERT_TRUE(device.ok()) << device.status();
  LlamaEngineOptions options = ContractOptions({}, Model());
  options.device = "Abacus0";
  const auto engine = LoadLlamaEngine(options);
  EXPECT_EQ(ReasonOf(engine.status()), v1::REASON_CONFIGURATION_INVALID);
  EXPECT_THAT(std::string(engine.status().message()), testing::HasSubstr(device->name));
  options.device = device->name;
  EXPECT_TRUE(LoadLlamaEngine(options).ok());
}

}  // namespace
}  // namespace meshnet

#include "cc/shard_engine/llama/llama_engine.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/system/threads.h"
#include "cc/shard_engine/contract_test_suite.h"
#include "cc/shard_engine/llama/testing/contract_options.h"
#include "cc/shard_engine/llama/testing/tiny_llama.h"
#include "gtest/gtest.h"

namespace meshnet {
namespace {

std::string TinyModel(const TinyLlamaOptions& options, const std::string& name) {
  const std::string path = testing::TempDir() + "/" + name + ".gguf";
  const absl::Status status = WriteTinyLlama(path, options);
  EXPECT_TRUE(status.ok()) << status;
  return path;
}

const std::string& DefaultModel() {
  static const auto* path = new std::string(TinyModel({}, "tiny"));
  return *path;
}

LlamaEngineOptions OptionsFor(const ContractConfig& config) {
  return ContractOptions(config, DefaultModel());
}

EngineUnderTest LlamaUnderTest() {
  EngineUnderTest engine;
  engine.name = "Llama";
  engine.model_layers = 6;
  engine.evidence = Evidence::kDark;
  engine.make = [](const ContractConfig& config) { return LoadLlamaEngine(OptionsFor(config)); };
  return engine;
}

// The same without flash attention and weight rearrangement, with a tied output.
EngineUnderTest PlainLlamaUnderTest() {
  EngineUnderTest engine = LlamaUnderTest();
  engine.name = "PlainTiedLlama";
  engine.make = [](const ContractConfig& config) {
    static const auto* path = new std::string([] {
      TinyLlamaOptions tiny;
      tiny.tied_output = true;
      tiny.quantized = false;
      return TinyModel(tiny, "tied");
    }());
    LlamaEngineOptions options = OptionsFor(config);
    options.model_path = *path;
    options.flash_attention = false;
    options.repack = false;
    return LoadLlamaEngine(options);
  };
  return engine;
}

INSTANTIATE_TEST_SUITE_P(Engines, EngineContractTest,
                         testing::Values(LlamaUnderTest(), PlainLlamaUnderTest()), NameOf);

v1::Reason ReasonOfLoading(const LlamaEngineOptions& options) {
  return ReasonOf(LoadLlamaEngine(options).status());
}

TEST(LoadLlamaEngineTest, FilesThatAreNoModelAreRefused) {
  LlamaEngineOptions options;
  options.model_path = testing::TempDir() + "/absent.gguf";
  EXPECT_EQ(ReasonOfLoading(options), v1::REASON_ARTIFACT_UNREADABLE);
  options.model_path = testing::TempDir();
  EXPECT_EQ(ReasonOfLoading(options), v1::REASON_ARTIFACT_UNREADABLE);
  options.model_path = testing::TempDir() + "/garbage.gguf";
  std::ofstream(options.model_path) << "this is no model";
  EXPECT_EQ(ReasonOfLoading(options), v1::REASON_ARTIFACT_INVALID);

  std::ifstream whole(DefaultModel(), std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(whole)), std::istreambuf_iterator<char>());
  options.model_path = testing::TempDir() + "/short.gguf";
  std::ofstream(options.model_path, std::ios::binary) << bytes.substr(0, bytes.size() / 2);
  EXPECT_EQ(ReasonOfLoading(options), v1::REASON_ARTIFACT_INVALID);
}

TEST(LoadLlamaEngineTest, OtherArchitecturesAreRefusedByName) {
  TinyLlamaOptions tiny;
  tiny.architecture = "qwen2";
  LlamaEngineOptions options;
  options.model_path = TinyModel(tiny, "qwen2");
  const auto engine = LoadLlamaEngine(options);
  EXPECT_EQ(ReasonOf(engine.status()), v1::REASON_ARCHITECTURE_UNSUPPORTED);
  EXPECT_THAT(std::string(engine.status().message()), testing::HasSubstr("qwen2"));
}

TEST(LoadLlamaEngineTest, TheArtifactIsHashed) {
  LlamaEngineOptions options = OptionsFor({});
  const auto engine = LoadLlamaEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  options.expected_artifact_sha256 = (*engine)->capability().artifact_sha256;
  EXPECT_TRUE(LoadLlamaEngine(options).ok());
  options.expected_artifact_sha256[0] ^= 1;
  EXPECT_EQ(ReasonOfLoading(options), v1::REASON_ARTIFACT_MISMATCH);
}

TEST(LoadLlamaEngineTest, OptionsOutOfBoundsAreRefused) {
  const LlamaEngineOptions good = OptionsFor({});
  for (const auto& spoil : std::vector<std::function<void(LlamaEngineOptions*)>>{
           [](LlamaEngineOptions* o) { o->max_sessions = 0; },
           [](LlamaEngineOptions* o) { o->max_sessions = 257; },
           [](LlamaEngineOptions* o) { o->context_tokens = 0; },
           [](LlamaEngineOptions* o) { o->context_tokens = 0xffffffff; },
           [](LlamaEngineOptions* o) { o->max_step_tokens = 0; },
           [](LlamaEngineOptions* o) { o->poll = 101; },
           [](LlamaEngineOptions* o) {
             o->kv_type = LlamaEngineOptions::KvType::kQ8_0;
             o->flash_attention = false;
           }}) {
    LlamaEngineOptions options = good;
    spoil(&options);
    EXPECT_EQ(ReasonOfLoading(options), v1::REASON_CONFIGURATION_INVALID);
  }
}

TEST(LoadLlamaEngineTest, TheMemoryBudgetHoldsAtLoad) {
  LlamaEngineOptions options = OptionsFor({});
  const auto engine = LoadLlamaEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  const MemoryEstimate memory = (*engine)->EstimateMemory();
  options.memory_budget_bytes =
      memory.weights + options.max_sessions * memory.kv_per_session + memory.compute;
  EXPECT_TRUE(LoadLlamaEngine(options).ok());
  --options.memory_budget_bytes;
  EXPECT_EQ(ReasonOfLoading(options), v1::REASON_MEMORY_BUDGET_EXCEEDED);
}

TEST(LoadLlamaEngineTest, OwnershipComesFromWhatIsLoaded) {
  const auto tensors = [](LayerRange range) {
    LlamaEngineOptions options = OptionsFor({});
    options.range = range;
    const auto engine = LoadLlamaEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? (*engine)->capability().owned_tensors : 0;
  };
  // Nine per block, the embedding at the head, norm and output at the tail.
  EXPECT_EQ(tensors({0, 6}), 57u);
  EXPECT_EQ(tensors({0, 2}), 19u);
  EXPECT_EQ(tensors({2, 5}), 27u);
  EXPECT_EQ(tensors({5, 6}), 11u);
}

TEST(LlamaRecipeTest, EveryFieldThatChangesNumbersChangesTheFingerprint) {
  const auto fingerprint = [](const std::function<void(LlamaEngineOptions*)>& change) {
    LlamaEngineOptions options = OptionsFor({});
    change(&options);
    const auto engine = LoadLlamaEngine(options);
    EXPECT_TRUE(engine.ok()) << engine.status();
    return engine.ok() ? (*engine)->capability().recipe_fingerprint : "";
  };
  const std::string base = fingerprint([](LlamaEngineOptions*) {});
  const std::vector<std::function<void(LlamaEngineOptions*)>> same = {
      [](LlamaEngineOptions* o) { o->range = {1, 3}; },
      [](LlamaEngineOptions* o) { o->max_sessions = 2; },
      [](LlamaEngineOptions* o) { o->context_tokens = 512; },
      [](LlamaEngineOptions* o) { o->poll = 100; },
      [](LlamaEngineOptions* o) { o->pin_threads = true; },
      [](LlamaEngineOptions* o) { o->idle_ttl = absl::Seconds(1); },
  };
  for (size_t i = 0; i < same.size(); ++i) EXPECT_EQ(fingerprint(same[i]), base) << i;
  const std::vector<std::function<void(LlamaEngineOptions*)>> different = {
      [](LlamaEngineOptions* o) { o->threads = 2; },
      [](LlamaEngineOptions* o) { o->max_step_tokens = 8; },
      [](LlamaEngineOptions* o) { o->flash_attention = false; },
      [](LlamaEngineOptions* o) { o->kv_type = LlamaEngineOptions::KvType::kQ8_0; },
      [](LlamaEngineOptions* o) { o->repack = false; },
      [](LlamaEngineOptions* o) { o->batch_policy = BatchPolicy::kShared; },
      [](LlamaEngineOptions* o) {
        TinyLlamaOptions tiny;
        tiny.seed = 2;
        o->model_path = TinyModel(tiny, "other");
      },
  };
  for (size_t i = 0; i < different.size(); ++i) EXPECT_NE(fingerprint(different[i]), base) << i;
}

TEST(LlamaRecipeTest, ThreadsDoNotMatterWithoutFlashAttention) {
  LlamaEngineOptions options = OptionsFor({});
  options.flash_attention = false;
  const auto one = LoadLlamaEngine(options);
  options.threads = 2;
  const auto two = LoadLlamaEngine(options);
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ((*one)->capability().recipe_fingerprint, (*two)->capability().recipe_fingerprint);
}

#if defined(__linux__)  // macOS binds no thread to a CPU
// The CPUs that each thread of this process may use, sorted.
std::vector<std::string> ThreadPlaces() {
  std::vector<std::string> places;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    const std::string name = "Cpus_allowed_list:\t";
    for (std::string line; std::getline(status, line);) {
      if (line.compare(0, name.size(), name) == 0) places.push_back(line.substr(name.size()));
    }
  }
  std::sort(places.begin(), places.end());
  return places;
}

TEST(LlamaEngineTest, PinnedThreadsKeepToOneCpuEach) {
  std::vector<int> cpus = AllowedCpus();
  ASSERT_GE(cpus.size(), 2u) << "this test needs two CPUs";
  // Two of the CPUs, so that the test does not depend on how many there are.
  cpus.resize(2);
  std::thread([&cpus] {
    KeepToCpus(cpus);
    ASSERT_EQ(AllowedCpus(), cpus);
    LlamaEngineOptions options = OptionsFor({});
    options.threads = 2;
    const std::vector<std::string> others = ThreadPlaces();
    options.pin_threads = true;
    const auto engine = LoadLlamaEngine(options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    ASSERT_TRUE((*engine)->WarmUp().ok());
    // Who warms up goes on to other things, and starts threads that would inherit its place.
    EXPECT_EQ(AllowedCpus(), cpus);
    ASSERT_TRUE((*engine)->OpenSession(Key('a'), {}, nullptr).ok());
    const std::vector<int32_t> tokens = {5};
    Step step;
    step.session = Key('a');
    step.token_ids = tokens;
    std::vector<StepOutput> outputs;
    ASSERT_TRUE((*engine)->Execute({step}, &outputs).ok());
    ASSERT_TRUE(outputs[0].status.ok()) << outputs[0].status;
    std::vector<std::string> places = ThreadPlaces();
    for (const int cpu : cpus) {
      const auto found = std::find(places.begin(), places.end(), absl::StrCat(cpu));
      ASSERT_NE(found, places.end()) << "nobody keeps to CPU " << cpu;
      places.erase(found);
    }
    // This thread and one of ggml's; nobody else was moved.
    EXPECT_EQ(places.size(), others.size() - 1);
  }).join();
}
#endif

TEST(LlamaEngineTest, MoreLogitRowsThanLoadedForAreRefused) {
  LlamaEngineOptions options = OptionsFor({});
  options.max_logit_rows = 0;
  const auto engine = LoadLlamaEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  ASSERT_TRUE((*engine)->OpenSession(Key('a'), {}, nullptr).ok());
  const std::vector<int32_t> tokens = {5, 6, 7, 8, 9};
  Step step;
  step.session = Key('a');
  step.token_ids = tokens;
  step.output_rows = OutputRows::kAllLogits;
  std::vector<StepOutput> outputs;
  ASSERT_TRUE((*engine)->Execute({step}, &outputs).ok());
  EXPECT_EQ(ReasonOf(outputs[0].status), v1::REASON_FEATURE_UNSUPPORTED);
}

TEST(LlamaEngineTest, AHugeResidualIsAnErrorOfItsStepOnly) {
  LlamaEngineOptions options = OptionsFor({});
  options.range = {3, 6};
  const auto engine = LoadLlamaEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  for (const char id : {'a', 'b'}) {
    ASSERT_TRUE((*engine)->OpenSession(Key(id), {}, nullptr).ok());
  }
  const std::vector<int32_t> tokens = {5};
  const std::vector<float> huge(64, 3e38f);
  const std::vector<float> normal(64, 0.3f);
  Step bad;
  bad.session = Key('a');
  bad.token_ids = tokens;
  bad.residual = huge;
  bad.output_rows = OutputRows::kLast;
  Step good = bad;
  good.session = Key('b');
  good.residual = normal;
  std::vector<StepOutput> outputs;
  ASSERT_TRUE((*engine)->Execute({bad, good}, &outputs).ok());
  if (!outputs[0].status.ok()) {
    EXPECT_EQ(ReasonOf(outputs[0].status), v1::REASON_ENGINE_OUTPUT_INVALID);
    EXPECT_EQ(outputs[0].cached_tokens, 0u);
  }
  EXPECT_TRUE(outputs[1].status.ok()) << outputs[1].status;
  EXPECT_TRUE((*engine)->health().ok());
}

TEST(LlamaEngineTest, SharedStepsBeyondOneCallAreCut) {
  LlamaEngineOptions options = OptionsFor({});
  options.batch_policy = BatchPolicy::kShared;
  options.max_sessions = 8;
  const auto engine = LoadLlamaEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  std::vector<int32_t> tokens(16);
  for (int32_t i = 0; i < 16; ++i) tokens[i] = 20 + i;
  std::vector<Step> steps;
  for (char id = 'a'; id < 'i'; ++id) {
    ASSERT_TRUE((*engine)->OpenSession(Key(id), {}, nullptr).ok());
    Step step;
    step.session = Key(id);
    step.token_ids = tokens;
    step.output_rows = OutputRows::kLast;
    steps.push_back(step);
  }
  std::vector<StepOutput> outputs;
  ASSERT_TRUE((*engine)->Execute(steps, &outputs).ok());
  for (const StepOutput& output : outputs) {
    ASSERT_TRUE(output.status.ok()) << output.status;
    EXPECT_EQ(output.cached_tokens, 16u);
  }
  // A call takes 16 rows: one step each. Decode steps share one.
  EXPECT_EQ((*engine)->metrics().engine_calls, 8u);
  for (Step& step : steps) {
    step.start_position = 16;
    step.token_ids = absl::MakeConstSpan(tokens).first(1);
  }
  ASSERT_TRUE((*engine)->Execute(steps, &outputs).ok());
  EXPECT_EQ((*engine)->metrics().engine_calls, 9u);
  for (const StepOutput& output : outputs) {
    EXPECT_EQ(output.cached_tokens, 17u);
    EXPECT_EQ(output.token->token_id, outputs[0].token->token_id) << "equal sessions";
  }
}

TEST(LlamaEngineTest, LogLinesAreWhole) {
  std::vector<std::string> lines;
  LlamaEngineOptions options = OptionsFor({});
  options.log = [&lines](LlamaLogLevel, absl::string_view line) { lines.emplace_back(line); };
  const auto engine = LoadLlamaEngine(options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  SetLlamaLogSink(nullptr);
  EXPECT_FALSE(lines.empty());
  for (const std::string& line : lines) EXPECT_EQ(line.find('\n'), std::string::npos);
}

TEST(LlamaEngineTest, TemplatesComeFromTheArtifact) {
  const auto engine = LoadLlamaEngine(OptionsFor({}));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const Tokenizer& tokenizer = (*engine)->tokenizer();
  EXPECT_THAT(tokenizer.chat_template(), testing::HasSubstr("m['role']"));
  ASSERT_EQ(tokenizer.named_chat_templates().size(), 1u);
  EXPECT_EQ(tokenizer.named_chat_templates().at("tool_use"), "tools: {{ tools }}");
  EXPECT_TRUE(tokenizer.add_bos());
  EXPECT_EQ(tokenizer.end_of_generation_ids(), std::vector<int32_t>{2});
  EXPECT_EQ(tokenizer.Tokenize("<s>", false, true)->front(), 1);
}

}  // namespace
}  // namespace meshnet

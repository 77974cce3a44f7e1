// A DeepSeek V4 at chosen cuts against itself whole, bit for bit. DEEPSEEK4_MODEL is the file, or
// the parts of a split set; DEEPSEEK4_CUTS holds the cuts, as in "1;3;14,28".
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "gtest/gtest.h"
#include "tests/parity/trace.h"

namespace meshnet {
namespace {

TEST(DeepSeek4CutsTest, ChosenCuts) {
  LlamaEngineOptions options;
  const std::vector<std::string> files = absl::StrSplit(std::getenv("DEEPSEEK4_MODEL"), ' ');
  options.model_path = files.front();
  options.max_sessions = 1;
  options.context_tokens = 512;
  options.max_step_tokens = 64;
  options.max_logit_rows = 64;
  options.threads = 1;
  std::vector<int32_t> prompt;
  Trace whole;
  {
    const EngineChain chain = LoadStages(options, {});
    ASSERT_FALSE(chain.empty());
    prompt = RandomTokens(chain[0]->capability().vocabulary_size, 200, 11);
    whole = RunSession(chain, Key('w'), prompt, 64, 32);
    ASSERT_EQ(whole.text.size(), 33u);
  }
  for (const absl::string_view stages :
       absl::StrSplit(std::getenv("DEEPSEEK4_CUTS"), ';', absl::SkipEmpty())) {
    SCOPED_TRACE(stages);
    Cuts cuts;
    for (const absl::string_view cut : absl::StrSplit(stages, ',')) {
      ASSERT_TRUE(absl::SimpleAtoi(cut, &cuts.emplace_back()));
    }
    ExpectEqual(RunSession(LoadStages(options, cuts), Key('s'), prompt, 64, 32), whole);
  }
}

}  // namespace
}  // namespace meshnet

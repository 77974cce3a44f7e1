// Models that consist of several files, the first of which holds no tensor: the engine on them, and
// what it says about sets that are not whole.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cc/common/status.h"
#include "cc/shard_engine/engine_chain.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/shard_engine/llama/testing/tiny_llama.h"
#include "ggml.h"
#include "gguf.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/parity/trace.h"

namespace meshnet {
namespace {

namespace fs = std::filesystem;

LlamaEngineOptions OptionsFor(const std::string& path) {
  LlamaEngineOptions options;
  options.model_path = path;
  options.max_sessions = 1;
  options.context_tokens = 256;
  options.max_step_tokens = 64;
  options.max_logit_rows = 64;
  options.threads = 1;
  return options;
}

// A model twice: as one file and as a split set.
struct Both {
  std::string file;
  std::vector<std::string> parts;
};

Both DeepSeek4() {
  Both both;
  both.file = std::getenv("DEEPSEEK4_MODEL");
  both.parts = absl::StrSplit(std::getenv("DEEPSEEK4_SPLIT_SET"), ' ');
  return both;
}

Both Dense() {
  Both both;
  both.file = testing::TempDir() + "/dense.gguf";
  TinyLlamaOptions options;
  EXPECT_TRUE(WriteTinyLlama(both.file, options).ok());
  options.parts = 4;
  EXPECT_TRUE(WriteTinyLlama(both.file, options).ok());
  for (uint32_t part = 1; part <= options.parts; ++part) {
    both.parts.push_back(testing::TempDir() + absl::StrCat("/dense-0000", part, "-of-00004.gguf"));
  }
  return both;
}

struct Model {
  std::string name;
  Both (*make)();
  std::vector<Cuts> cuts;
};

class SplitSetTest : public testing::TestWithParam<Model> {
 protected:
  const Both model_ = GetParam().make();
};

INSTANTIATE_TEST_SUITE_P(Models, SplitSetTest,
                         testing::Values(Model{"Dense", Dense, {{3}, {1, 2, 5}}},
                                         Model{"DeepSeek4", DeepSeek4, {{3}, {1, 2, 6}}}),
                         [](const auto& test) { return test.param.name; });

TEST_P(SplitSetTest, WholeAndRangesEqualTheOneFile) {
  const EngineChain whole = LoadStages(OptionsFor(model_.file), {});
  const std::vector<int32_t> prompt = RandomTokens(whole[0]->capability().vocabulary_size, 150, 11);
  const Trace expected = RunSession(whole, Key('w'), prompt, 64, 16);
  std::vector<Cuts> all = GetParam().cuts;
  all.push_back({});
  for (const Cuts& cuts : all) {
    SCOPED_TRACE(testing::PrintToString(cuts));
    const EngineChain stages = LoadStages(OptionsFor(model_.parts.front()), cuts);
    ExpectEqual(RunSession(stages, Key('s'), prompt, 64, 16), expected);
    uint64_t owned = 0;
    for (const auto& stage : stages) owned += stage->capability().owned_tensors;
    EXPECT_EQ(owned, whole[0]->capability().owned_tensors);
  }
}

TEST_P(SplitSetTest, AnyPartStandsForTheSet) {
  const auto by_first = LoadLlamaEngine(OptionsFor(model_.parts.front()));
  const auto by_last = LoadLlamaEngine(OptionsFor(model_.parts.back()));
  ASSERT_TRUE(by_first.ok()) << by_first.status();
  ASSERT_TRUE(by_last.ok()) << by_last.status();
  EXPECT_EQ((*by_first)->capability().recipe, (*by_last)->capability().recipe);
}

// Bytes of a file that lie in memory for this process's mappings of it.
uint64_t ResidentBytes(const std::string& path) {
  const std::string name = fs::canonical(path);
  std::ifstream maps("/proc/self/smaps");
  uint64_t resident = 0;
  bool ours = false;
  for (std::string line; std::getline(maps, line);) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    uint64_t kib = 0;
    if (!absl::EndsWith(words[0], ":")) {
      ours = words.back() == name;
    } else if (ours && words[0] == "Rss:" && absl::SimpleAtoi(words[1], &kib)) {
      resident += kib * 1024;
    }
  }
  return resident;
}

// Bytes of a part's tensors that the layers [begin, end) own, end not being the last one.
uint64_t OwnedBytes(const std::string& path, uint32_t begin, uint32_t end, uint64_t* tensors) {
  gguf_init_params params = {};
  params.no_alloc = true;
  gguf_context* gguf = gguf_init_from_file(path.c_str(), params);
  uint64_t bytes = 0;
  for (int64_t id = 0; id < gguf_get_n_tensors(gguf); ++id) {
    const std::vector<std::string> name = absl::StrSplit(gguf_get_tensor_name(gguf, id), '.');
    uint32_t layer = 0;
    if (name[0] != "blk" || !absl::SimpleAtoi(name[1], &layer)) continue;
    if (layer < begin || layer >= end) continue;
    bytes += gguf_get_tensor_size(gguf, id);
    ++*tensors;
  }
  gguf_free(gguf);
  return bytes;
}

// What lies in memory of each part are the pages of the range's tensors: nothing of a part that has
// none, but for its last page.
TEST_P(SplitSetTest, ARangeHoldsItsOwnTensorsOfEachPart) {
  constexpr uint64_t kPage = 4096;
  LlamaEngineOptions options = OptionsFor(model_.parts.front());
  options.repack = false;  // copies would hide what is read
  for (const LayerRange range : {LayerRange{1, 2}, LayerRange{2, 3}, LayerRange{4, 5}}) {
    SCOPED_TRACE(range.begin);
    options.range = range;
    const auto engine = LoadLlamaEngine(options);
    ASSERT_TRUE(engine.ok()) << engine.status();
    ASSERT_TRUE((*engine)->WarmUp().ok());
    uint64_t owned = 0;
    uint64_t owned_tensors = 0;
    for (const std::string& part : model_.parts) {
      SCOPED_TRACE(part);
      uint64_t tensors = 0;
      const uint64_t bytes = OwnedBytes(part, range.begin, range.end, &tensors);
      EXPECT_LE(ResidentBytes(part), bytes + kPage * (2 * tensors + 1));
      if (bytes > 0) {
        EXPECT_GE(ResidentBytes(part), bytes / 2) << "weights are used where they lie";
      }
      owned += bytes;
      owned_tensors += tensors;
    }
    EXPECT_EQ((*engine)->capability().owned_tensor_bytes, owned);
    EXPECT_EQ((*engine)->capability().owned_tensors, owned_tensors);
  }
}

// A copy of the set that may be spoilt.
std::vector<std::string> Copy(const std::vector<std::string>& parts, const std::string& name) {
  const fs::path folder = fs::path(testing::TempDir()) / name;
  fs::remove_all(folder);
  fs::create_directories(folder);
  std::vector<std::string> copies;
  for (const std::string& part : parts) {
    copies.push_back(folder / fs::path(part).filename());
    fs::copy_file(part, copies.back());
    fs::permissions(copies.back(), fs::perms::owner_write, fs::perm_options::add);
  }
  return copies;
}

absl::Status Loading(const std::vector<std::string>& parts) {
  return LoadLlamaEngine(OptionsFor(parts.front())).status();
}

void FlipByte(const std::string& path, int64_t from_end) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(-from_end, std::ios::end);
  const char byte = static_cast<char>(file.get() ^ 1);
  file.seekp(-from_end, std::ios::end);
  file.put(byte);
}

TEST_P(SplitSetTest, TheIdentityCoversEveryPart) {
  const auto engine = LoadLlamaEngine(OptionsFor(model_.parts.front()));
  ASSERT_TRUE(engine.ok()) << engine.status();
  const std::string identity = (*engine)->capability().artifact_sha256;
  const auto one_file = LoadLlamaEngine(OptionsFor(model_.file));
  ASSERT_TRUE(one_file.ok()) << one_file.status();
  EXPECT_NE(identity, (*one_file)->capability().artifact_sha256);
  for (size_t part = 1; part < model_.parts.size(); ++part) {
    const std::vector<std::string> copies = Copy(model_.parts, "changed");
    LlamaEngineOptions options = OptionsFor(copies.front());
    options.expected_artifact_sha256 = identity;
    // A range that needs the keys and little of the parts.
    options.range = {1, 2};
    EXPECT_TRUE(LoadLlamaEngine(options).ok());
    FlipByte(copies[part], 1);
    EXPECT_EQ(ReasonOf(LoadLlamaEngine(options).status()), v1::REASON_ARTIFACT_MISMATCH) << part;
  }
}

// Writes `path` anew, with other keys and the same tensors.
void ChangeKeys(const std::string& path, const std::function<void(gguf_context*)>& change) {
  ggml_context* tensors = nullptr;
  gguf_init_params params = {};
  params.ctx = &tensors;
  gguf_context* old = gguf_init_from_file(path.c_str(), params);
  gguf_context* changed = gguf_init_empty();
  gguf_set_kv(changed, old);
  change(changed);
  for (int64_t id = 0; id < gguf_get_n_tensors(old); ++id) {
    gguf_add_tensor(changed, ggml_get_tensor(tensors, gguf_get_tensor_name(old, id)));
  }
  EXPECT_TRUE(gguf_write_to_file(changed, path.c_str(), /*only_meta=*/false));
  gguf_free(changed);
  gguf_free(old);
  ggml_free(tensors);
}

struct Fault {
  std::string says;
  v1::Reason reason;
  std::function<void(const std::vector<std::string>& parts)> spoil;
};

TEST_P(SplitSetTest, SetsThatAreNotWholeAreRefusedByReason) {
  const std::vector<Fault> faults = {
      {"No such file", v1::REASON_ARTIFACT_UNREADABLE,
       [](const auto& parts) { fs::remove(parts.back()); }},
      {"and no other", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         const std::string count = parts.front().substr(parts.front().find("-of-"));
         const fs::path folder = fs::path(parts.front()).parent_path();
         std::string name = fs::path(parts.front()).filename();
         name.replace(name.find("-00001"), 6, "-00009");
         fs::copy_file(parts.back(), folder / name);
       }},
      {"by its keys it is part", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         fs::rename(parts[1], parts[1] + ".tmp");
         fs::rename(parts[2], parts[1]);
         fs::rename(parts[1] + ".tmp", parts[2]);
       }},
      {"expected NAME-00001-of-", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         ChangeKeys(parts.front(),
                    [](gguf_context* gguf) { gguf_set_val_u16(gguf, "split.count", 7); });
       }},
      {"by its keys it is part", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         ChangeKeys(parts.back(),
                    [](gguf_context* gguf) { gguf_set_val_u16(gguf, "split.count", 9); });
       }},
      {"split.tensors.count is not that of", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         ChangeKeys(parts.back(),
                    [](gguf_context* gguf) { gguf_set_val_i32(gguf, "split.tensors.count", 3); });
       }},
      {"general.architecture is not that of", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         ChangeKeys(parts.back(), [](gguf_context* gguf) {
           gguf_set_val_str(gguf, "general.architecture", "another");
         });
       }},
      {"expected 5 tensors in all parts", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         for (const std::string& part : parts) {
           ChangeKeys(part,
                      [](gguf_context* gguf) { gguf_set_val_i32(gguf, "split.tensors.count", 5); });
         }
       }},
      {"is in another part, too", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         fs::copy_file(parts[1], parts[2], fs::copy_options::overwrite_existing);
         ChangeKeys(parts[2], [](gguf_context* gguf) { gguf_set_val_u16(gguf, "split.no", 2); });
       }},
      {"split.no to be a uint16", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) {
         ChangeKeys(parts[1],
                    [](gguf_context* gguf) { gguf_set_val_str(gguf, "split.no", "second"); });
       }},
      {"its header does not parse", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) { std::ofstream(parts[1]) << "this is no model"; }},
      {"cannot load layers", v1::REASON_ARTIFACT_INVALID,
       [](const auto& parts) { fs::resize_file(parts[1], fs::file_size(parts[1]) - 64); }},
  };
  for (const Fault& fault : faults) {
    SCOPED_TRACE(fault.says);
    const std::vector<std::string> copies = Copy(model_.parts, "spoilt");
    fault.spoil(copies);
    const absl::Status status = Loading(copies);
    EXPECT_EQ(ReasonOf(status), fault.reason) << status;
    EXPECT_THAT(std::string(status.message()), testing::HasSubstr(fault.says));
  }
  EXPECT_TRUE(Loading(Copy(model_.parts, "spoilt")).ok());
}

}  // namespace
}  // namespace meshnet

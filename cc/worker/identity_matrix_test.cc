// Every field of a real recipe, one at a time, in every stage's place: the stage that differs
// refuses the route, and nothing has been computed anywhere.
#include <atomic>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/ed25519_signer.h"
#include "cc/common/status.h"
#include "cc/shard_engine/fake/fake_engine.h"
#include "cc/shard_engine/llama/llama_engine.h"
#include "cc/shard_engine/llama/testing/tiny_llama.h"
#include "cc/worker/mixture_records.h"
#include "cc/worker/mixtures.h"
#include "cc/worker/test_cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace meshnet::worker {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Key;
using Recipe = std::vector<std::pair<std::string, std::string>>;

constexpr LayerRange kStages[] = {{0, 2}, {2, 5}, {5, 8}};

// What a llama engine says that it runs.
Recipe RealRecipe() {
  const std::string path = absl::StrCat(::testing::TempDir(), "/identity_matrix.gguf");
  EXPECT_TRUE(WriteTinyLlama(path).ok());
  LlamaEngineOptions options;
  options.model_path = path;
  options.threads = 1;
  auto engine = LoadLlamaEngine(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return (*engine)->capability().recipe;
}

class IdentityMatrixTest : public ::testing::Test {
 protected:
  // Opens a route over three stages, of which `odd` is made from `other`, under the identity of
  // the rest; what came back.
  v1::Error Refusal(const WorkerSpec& usual, const WorkerSpec& other, size_t odd) {
    auto cluster = MakeMemoryCluster({});
    std::vector<std::string> endpoints;
    for (size_t i = 0; i < std::size(kStages); ++i) {
      WorkerSpec spec = i == odd ? other : usual;
      spec.range = kStages[i];
      spec.engine.range = kStages[i];
      spec.engine.before_batch = [this] { ++batches_; };
      endpoints.push_back(cluster->Add(spec));
    }
    v1::OpenSession open = MakeOpen(*cluster, endpoints, "s");
    const v1::Capability capability =
        ToProto(cluster->worker(endpoints[(odd + 1) % endpoints.size()]));
    open.mutable_route()->set_recipe_fingerprint(capability.recipe().fingerprint());
    open.mutable_route()->set_artifact_sha256(capability.artifact_sha256());
    open.mutable_route()->set_model_layers(capability.model_layers());
    for (size_t i = 0; i < std::size(kStages); ++i) {
      v1::LayerRange* range =
          open.mutable_route()->mutable_hops(static_cast<int>(i))->mutable_range();
      range->set_begin(kStages[i].begin);
      range->set_end(kStages[i].end);
    }
    odd_fingerprint_ = ToProto(cluster->worker(endpoints[odd])).recipe().fingerprint();
    usual_fingerprint_ = capability.recipe().fingerprint();
    TestClient client(cluster.get(), endpoints[0], open);
    EXPECT_TRUE(client.WaitError());
    EXPECT_TRUE(cluster->WaitUntil([&] {
      for (const std::string& endpoint : endpoints) {
        if (cluster->open_sessions(endpoint) != 0) return false;
      }
      return true;
    }));
    for (const std::string& endpoint : endpoints) {
      const v1::Metrics metrics = cluster->worker(endpoint).GetMetrics();
      EXPECT_EQ(metrics.engine_calls(), 0);
      EXPECT_EQ(metrics.prefill_tokens() + metrics.decode_tokens(), 0);
    }
    return client.error().value_or(v1::Error());
  }

  static v1::Capability ToProto(Worker& worker) {
    v1::GetCapabilityRequest request;
    request.add_schema_versions(kSchemaVersion);
    return *worker.GetCapability(request);
  }

  void ExpectRefusedEverywhere(const WorkerSpec& usual, const WorkerSpec& other, v1::Reason reason,
                               const std::string& what) {
    for (size_t odd = 0; odd < std::size(kStages); ++odd) {
      const v1::Error error = Refusal(usual, other, odd);
      EXPECT_EQ(error.reason(), reason) << what << " at stage " << odd << ": " << error.message();
      EXPECT_EQ(error.stage_begin(), kStages[odd].begin) << what;
      EXPECT_EQ(error.stage_end(), kStages[odd].end) << what;
      if (reason == v1::REASON_RECIPE_MISMATCH) {
        EXPECT_NE(odd_fingerprint_, usual_fingerprint_);
        EXPECT_THAT(error.message(), HasSubstr(odd_fingerprint_));
        EXPECT_THAT(error.message(), HasSubstr(usual_fingerprint_));
      }
      ++cells_;
    }
    EXPECT_EQ(batches_.load(), 0) << what;
  }

  std::atomic<int> batches_{0};
  int cells_ = 0;
  std::string odd_fingerprint_;
  std::string usual_fingerprint_;
};

TEST_F(IdentityMatrixTest, EveryFieldInEveryPlace) {
  const Recipe recipe = RealRecipe();
  WorkerSpec usual;
  usual.engine.recipe = recipe;
  for (size_t i = 0; i < recipe.size(); ++i) {
    WorkerSpec other = usual;
    other.engine.recipe[i].second += "x";
    ExpectRefusedEverywhere(usual, other, v1::REASON_RECIPE_MISMATCH, recipe[i].first);
    // A field that is not there is another recipe as well.
    other.engine.recipe.erase(other.engine.recipe.begin() + static_cast<std::ptrdiff_t>(i));
    ExpectRefusedEverywhere(usual, other, v1::REASON_RECIPE_MISMATCH,
                            absl::StrCat("no ", recipe[i].first));
  }
  WorkerSpec more = usual;
  more.engine.recipe.emplace_back("zz_new", "1");
  ExpectRefusedEverywhere(usual, more, v1::REASON_RECIPE_MISMATCH, "one more");
  EXPECT_EQ(cells_, static_cast<int>(recipe.size() * 2 + 1) * 3);
}

TEST_F(IdentityMatrixTest, WhatRoutesNameBesidesTheRecipe) {
  WorkerSpec usual;
  WorkerSpec other = usual;
  other.engine.artifact_name = "another";
  ExpectRefusedEverywhere(usual, other, v1::REASON_ARTIFACT_MISMATCH, "artifact");
  usual.engine.recipe = {{"backend", "fake"}};
  other = usual;
  other.engine.layers = 9;
  ExpectRefusedEverywhere(usual, other, v1::REASON_RANGE_MISMATCH, "model_layers");
}

// The first two stages of one lane and the last of another, by a record for the mixture.
class MixedRouteTest : public IdentityMatrixTest {
 protected:
  static constexpr size_t kTail = std::size(kStages) - 1;

  struct Lanes {
    Recipe head = {{"backend", "cpu"}, {"kv_type", "f16"}};
    Recipe tail = {{"backend", "vulkan"}, {"accelerator", "gpu"}, {"kv_type", "f16"}};
  };

  // What came of a route under the mixture's fingerprint where each stage has the records that
  // `records` gives it; an empty error when it opened.
  v1::Error Open(const Lanes& lanes, const std::function<std::string(size_t stage)>& records) {
    auto cluster = MakeMemoryCluster({});
    std::vector<std::string> endpoints;
    for (size_t i = 0; i < std::size(kStages); ++i) {
      WorkerSpec spec;
      spec.range = kStages[i];
      spec.engine.range = kStages[i];
      spec.engine.recipe = i == kTail ? lanes.tail : lanes.head;
      spec.engine.before_batch = [this] { ++batches_; };
      if (const std::string lines = records(i); !lines.empty()) {
        auto mixtures = Mixtures::FromRecords(lines, signer_.PublicPem());
        EXPECT_TRUE(mixtures.ok()) << mixtures.status();
        spec.worker.mixtures = *std::move(mixtures);
      }
      endpoints.push_back(cluster->Add(spec));
    }
    v1::OpenSession open = MakeOpen(*cluster, endpoints, "s");
    open.mutable_route()->set_recipe_fingerprint(MixedFingerprint(SharedFingerprint(lanes.head),
                                                                  RecipeFingerprint(lanes.head),
                                                                  RecipeFingerprint(lanes.tail)));
    TestClient client(cluster.get(), endpoints[0], open);
    if (client.Opened()) {
      EXPECT_TRUE(client.Close());
      return v1::Error();
    }
    EXPECT_TRUE(client.WaitError());
    EXPECT_EQ(batches_.load(), 0);
    return client.error().value_or(v1::Error());
  }

  std::string Record(const Lanes& lanes, const std::string& status = "certified") const {
    return SignMixture(signer_, {SharedFingerprint(lanes.head), RecipeFingerprint(lanes.head),
                                 RecipeFingerprint(lanes.tail), 1, 0, status});
  }

  const Ed25519Signer signer_{3};
};

TEST_F(MixedRouteTest, ServedOnlyWhereEveryStageHasTheRecord) {
  const Lanes lanes;
  const std::string record = Record(lanes);
  EXPECT_EQ(Open(lanes, [&](size_t) { return record; }).reason(), v1::REASON_UNSPECIFIED);
  for (size_t without = 0; without < std::size(kStages); ++without) {
    const v1::Error error = Open(lanes, [&](size_t i) { return i == without ? "" : record; });
    EXPECT_EQ(error.reason(), v1::REASON_RECIPE_MISMATCH) << without;
    EXPECT_EQ(error.stage_begin(), kStages[without].begin);
    EXPECT_THAT(error.message(), HasSubstr(without == kTail ? "(lane vulkan)" : "(lane cpu)"));
    EXPECT_THAT(error.message(), HasSubstr("certification record (--mixtures)"));
  }
  const v1::Error revoked =
      Open(lanes, [&](size_t i) { return i == kTail ? Record(lanes, "revoked") : record; });
  EXPECT_EQ(revoked.reason(), v1::REASON_RECIPE_MISMATCH);
  EXPECT_EQ(revoked.stage_begin(), kStages[kTail].begin);
  EXPECT_THAT(revoked.message(), HasSubstr("revokes"));
}

TEST_F(MixedRouteTest, ARecordForTheOtherOrderIsNone) {
  const Lanes lanes;
  const Lanes exchanged = {lanes.tail, lanes.head};
  const v1::Error error = Open(lanes, [&](size_t) { return Record(exchanged); });
  EXPECT_EQ(error.reason(), v1::REASON_RECIPE_MISMATCH);
  EXPECT_EQ(error.stage_begin(), 0);
}

// The record alone, however signed, does not make two recipes fit that differ in anything but
// their lanes.
TEST_F(MixedRouteTest, LanesThatDifferInMoreAreRefusedInSpiteOfARecord) {
  for (size_t i = 0; i < Lanes().tail.size(); ++i) {
    Lanes lanes;
    lanes.tail[i].second += "x";
    const v1::Error error = Open(lanes, [&](size_t) { return Record(lanes); });
    if (lanes.tail[i].first != "kv_type") {
      EXPECT_EQ(error.reason(), v1::REASON_UNSPECIFIED) << lanes.tail[i].first;
      batches_ = 0;
      continue;
    }
    EXPECT_EQ(error.reason(), v1::REASON_RECIPE_MISMATCH);
    EXPECT_EQ(error.stage_begin(), kStages[kTail].begin);
    EXPECT_THAT(error.message(), HasSubstr("backend, build and device alone"));
  }
}

// The identity decision of the architecture names these; what they are called in the recipe.
TEST_F(IdentityMatrixTest, ARealRecipeCoversTheIdentityDecision) {
  const Recipe fields = RealRecipe();
  const std::map<std::string, std::string> recipe(fields.begin(), fields.end());
  EXPECT_EQ(recipe.size(), fields.size());
  for (const char* name :
       {"artifact_sha256", "tokenizer_sha256", "architecture", "adapter", "boundary_schema",
        "llama_cpp_commit", "llama_cpp_patches_sha256", "backend", "build_options", "cpu_variant",
        "cpu_repack", "quantization", "activation_dtype", "wire_dtype", "kv_layout", "kv_type",
        "batch_policy", "prefill_chunk", "flash_attention"}) {
    EXPECT_THAT(recipe, Contains(Key(std::string(name))));
  }
  EXPECT_THAT(recipe.at("build_options"), HasSubstr("-O3"));
}

}  // namespace
}  // namespace meshnet::worker

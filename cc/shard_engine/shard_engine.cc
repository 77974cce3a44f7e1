#include "cc/shard_engine/shard_engine.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/common/sha256.h"
#include "cc/common/status.h"

namespace meshnet {
namespace {

constexpr uint32_t kMaxPenaltyTokens = 4096;
constexpr uint32_t kMaxTopLogprobs = 20;
constexpr size_t kMaxLogitBiases = 1024;

absl::Status Invalid(absl::string_view field, absl::string_view bounds, double value) {
  return MakeError(v1::REASON_SAMPLING_INVALID,
                   absl::StrCat("sampling.", field, " must be in ", bounds, ", got ", value));
}

// False for NaN.
bool Between(float value, float low, float high) { return value >= low && value <= high; }

absl::Status ValidateLogitBias(const std::vector<std::pair<int32_t, float>>& bias,
                               uint32_t vocabulary_size) {
  if (bias.empty()) return absl::OkStatus();
  if (bias.size() > kMaxLogitBiases) {
    return Invalid("logit_bias", "[0, 1024] entries", static_cast<double>(bias.size()));
  }
  std::vector<int32_t> ids;
  ids.reserve(bias.size());
  for (const auto& [id, value] : bias) {
    if (id < 0 || static_cast<uint32_t>(id) >= vocabulary_size) {
      return Invalid("logit_bias.token_id", absl::StrCat("[0, ", vocabulary_size, ")"), id);
    }
    if (std::isnan(value) || (std::isinf(value) && value > 0)) {
      return Invalid("logit_bias.bias", "finite numbers and -inf", value);
    }
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice != ids.end()) {
    return MakeError(v1::REASON_SAMPLING_INVALID,
                     absl::StrCat("sampling.logit_bias must name a token once, token ", *twice,
                                  " came several times; add its biases up"));
  }
  return absl::OkStatus();
}

bool IsUnreserved(char c) {
  return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
         absl::string_view("._:/+,-").find(c) != absl::string_view::npos;
}

}  // namespace

uint64_t BoundarySchema::residual_width() const {
  for (const TensorSpec& tensor : tensors) {
    if (tensor.name != "residual") continue;
    uint64_t width = 1;
    for (const int64_t extent : tensor.shape) {
      if (extent >= 0) width *= static_cast<uint64_t>(extent);
    }
    return width;
  }
  return 0;
}

BoundarySchema DenseResidualSchema(uint32_t n_embd) {
  return BoundarySchema{"dense.residual",
                        1,
                        {{"residual", DType::kF32, {-1, static_cast<int64_t>(n_embd)}},
                         {"positions", DType::kI32, {-1}},
                         {"token_ids", DType::kI32, {-1}}}};
}

BoundarySchema HyperConnectionSchema(uint32_t streams, uint32_t n_embd) {
  return BoundarySchema{
      "deepseek4.mhc",
      1,
      {{"residual", DType::kF32, {-1, static_cast<int64_t>(streams), static_cast<int64_t>(n_embd)}},
       {"positions", DType::kI32, {-1}},
       {"token_ids", DType::kI32, {-1}}}};
}

std::vector<TensorSpec> ReservedMtpTensors(uint32_t streams, uint32_t n_embd) {
  return {
      {"mtp.hidden",
       DType::kF32,
       {-1, static_cast<int64_t>(streams), static_cast<int64_t>(n_embd)}},
      {"mtp.draft_token_ids", DType::kI32, {-1}},
  };
}

std::string SchemaFingerprint(const BoundarySchema& schema) {
  std::vector<std::pair<std::string, std::string>> fields = {
      {"schema", absl::StrCat(schema.name, "/", schema.version)}};
  for (size_t i = 0; i < schema.tensors.size(); ++i) {
    const TensorSpec& tensor = schema.tensors[i];
    fields.emplace_back(absl::StrCat("tensor.", i),
                        absl::StrCat(tensor.name, ":", tensor.dtype == DType::kF32 ? "f32" : "i32",
                                     ":", absl::StrJoin(tensor.shape, ",")));
  }
  return RecipeFingerprint(std::move(fields));
}

absl::Status ValidateSampling(const SamplingParams& params, uint32_t vocabulary_size) {
  if (!Between(params.temperature, 0.0f, 10.0f)) {
    return Invalid("temperature", "[0, 10]", params.temperature);
  }
  if (params.top_k < 0 || static_cast<uint32_t>(params.top_k) > vocabulary_size) {
    return Invalid("top_k", absl::StrCat("[0, ", vocabulary_size, "]"), params.top_k);
  }
  if (!Between(params.top_p, 0.0f, 1.0f) || params.top_p == 0.0f) {
    return Invalid("top_p", "(0, 1]", params.top_p);
  }
  if (!Between(params.min_p, 0.0f, 1.0f)) return Invalid("min_p", "[0, 1]", params.min_p);
  if (!Between(params.repetition_penalty, 0.0f, 10.0f) || params.repetition_penalty == 0.0f) {
    return Invalid("repetition_penalty", "(0, 10]", params.repetition_penalty);
  }
  if (!Between(params.frequency_penalty, -2.0f, 2.0f)) {
    return Invalid("frequency_penalty", "[-2, 2]", params.frequency_penalty);
  }
  if (!Between(params.presence_penalty, -2.0f, 2.0f)) {
    return Invalid("presence_penalty", "[-2, 2]", params.presence_penalty);
  }
  if (params.penalty_last_n < 1 || params.penalty_last_n > kMaxPenaltyTokens) {
    return Invalid("penalty_last_n", "[1, 4096]", params.penalty_last_n);
  }
  if (params.top_logprobs > kMaxTopLogprobs) {
    return Invalid("top_logprobs", "[0, 20]", params.top_logprobs);
  }
  const std::pair<const char*, const std::string*> texts[] = {{"grammar", &params.grammar},
                                                              {"json_schema", &params.json_schema}};
  for (const auto& [field, text] : texts) {
    if (text->size() > kMaxGrammarBytes) {
      return Invalid(field, absl::StrCat("[0, ", kMaxGrammarBytes, "] bytes"),
                     static_cast<double>(text->size()));
    }
  }
  if (!params.grammar.empty() && !params.json_schema.empty()) {
    return MakeError(v1::REASON_SAMPLING_INVALID,
                     "sampling.grammar and sampling.json_schema must not both be set; write what "
                     "the text must be in one of them");
  }
  return ValidateLogitBias(params.logit_bias, vocabulary_size);
}

std::string RecipeFingerprint(std::vector<std::pair<std::string, std::string>> fields) {
  std::sort(fields.begin(), fields.end());
  std::string canonical;
  for (const auto& [name, value] : fields) {
    absl::StrAppend(&canonical, name, "=");
    for (const char c : value) {
      if (IsUnreserved(c)) {
        canonical.push_back(c);
      } else {
        absl::StrAppendFormat(&canonical, "%%%02X", static_cast<unsigned char>(c));
      }
    }
    canonical.push_back('\n');
  }
  return Sha256Hex(canonical);
}

absl::Status MtpUnsupported() {
  return MakeError(v1::REASON_FEATURE_UNSUPPORTED,
                   "multi-token prediction (MTP) is reserved for a later version, and every recipe "
                   "has mtp=off; ask without it");
}

absl::Status ShardEngine::EnableMtp() { return MtpUnsupported(); }

absl::Status ShardEngine::ImportAuxiliaryState(const SessionKey& /*key*/,
                                               absl::string_view /*state*/) {
  return MakeError(v1::REASON_FEATURE_UNSUPPORTED,
                   "architecture state is reserved for a later version; prefill the session anew");
}

}  // namespace meshnet

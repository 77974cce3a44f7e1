#include "cc/worker/mixtures.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>
#include <tuple>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "cc/common/ed25519.h"
#include "cc/common/sha256.h"
#include "cc/common/status.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"

namespace meshnet::worker {
namespace {

using google::protobuf::Struct;

// As in python/meshnet/signing.py and certification.py.
constexpr absl::string_view kPurpose = "meshnet certification v1\n";
constexpr size_t kMaxRecordBytes = 8192;
constexpr double kMaxMs = 9007199254740992.0;

// What belongs to a lane alone: where and by which kernels it computes.
// meshnet_gguf.recipe.LANE_FIELDS has the same.
constexpr absl::string_view kLaneFields[] = {
    "accelerator", "accelerator_driver", "backend",         "build_options",
    "cpu_repack",  "cpu_variant",        "flash_attention", "flash_attention_threads",
};

absl::Status NoRecord(size_t line, absl::string_view what) {
  return MakeError(v1::REASON_CONFIGURATION_INVALID,
                   absl::StrCat("expected certification records in --mixtures, one a line, as "
                                "`meshnet certify` signs them; line ",
                                line, ": ", what));
}

bool IsIdentifier(absl::string_view text) {
  return !text.empty() && text.size() <= 128 && std::all_of(text.begin(), text.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '_' || c == ':' ||
           c == '-';
  });
}

// Empty for what is no text that needs no escapes in JSON.
std::string Text(const Struct& fields, const std::string& name) {
  const auto entry = fields.fields().find(name);
  if (entry == fields.fields().end() || !entry->second.has_string_value()) return "";
  const std::string& text = entry->second.string_value();
  return IsIdentifier(text) ? text : "";
}

std::optional<int64_t> Number(const Struct& fields, const std::string& name) {
  const auto entry = fields.fields().find(name);
  if (entry == fields.fields().end() || !entry->second.has_number_value()) return std::nullopt;
  const double value = entry->second.number_value();
  if (!(value >= 0 && value < kMaxMs) || value != std::floor(value)) return std::nullopt;
  return static_cast<int64_t>(value);
}

std::string LaneOf(const Capability& capability) {
  for (const auto& [name, value] : capability.recipe) {
    if (name == "backend") return absl::StrCat(" (lane ", value, ")");
  }
  return "";
}

}  // namespace

std::string MixedFingerprint(absl::string_view shared, absl::string_view head,
                             absl::string_view tail) {
  return Sha256Hex(absl::StrCat("mixed/1\n", shared, "\n", head, "\n", tail, "\n"));
}

std::string SharedFingerprint(const std::vector<std::pair<std::string, std::string>>& recipe) {
  std::vector<std::pair<std::string, std::string>> shared;
  std::copy_if(recipe.begin(), recipe.end(), std::back_inserter(shared), [](const auto& field) {
    return std::find(std::begin(kLaneFields), std::end(kLaneFields), field.first) ==
           std::end(kLaneFields);
  });
  return RecipeFingerprint(std::move(shared));
}

absl::StatusOr<Mixtures> Mixtures::FromRecords(absl::string_view records,
                                               absl::string_view public_keys_pem) {
  const auto keys = Ed25519Keys::FromPem(public_keys_pem);
  if (!keys.ok()) return keys.status();
  Mixtures mixtures;
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(records, '\n')) {
    ++number;
    if (line.empty()) continue;
    if (line.size() > kMaxRecordBytes) return NoRecord(number, "it has more than 8192 bytes");
    Struct fields;
    const auto parsed = google::protobuf::util::JsonStringToMessage(std::string(line), &fields);
    if (!parsed.ok()) return NoRecord(number, "it is no JSON object");
    const auto version = Number(fields, "version");
    if (version == 1) continue;  // of one lane
    if (version != 2) return NoRecord(number, "its version is not 1 or 2");

    Record record;
    record.id = Sha256Hex(line);
    record.head = Text(fields, "head");
    record.tail = Text(fields, "tail");
    record.shared = Text(fields, "shared");
    const std::string fingerprint = Text(fields, "fingerprint");
    const std::string key_id = Text(fields, "key_id");
    const std::string status = Text(fields, "status");
    const auto issued = Number(fields, "issued_ms");
    const auto expires = Number(fields, "expires_ms");
    std::string signature_text;
    if (const auto entry = fields.fields().find("signature"); entry != fields.fields().end()) {
      signature_text = entry->second.string_value();
    }
    std::string signature;
    if (!issued.has_value() || !expires.has_value() ||
        !absl::Base64Unescape(signature_text, &signature)) {
      return NoRecord(number, "a field is missing or malformed");
    }
    // Written anew it must be the line: then it has all fields, these alone, and in this form.
    const auto written = [&](absl::string_view signed_part) {
      return absl::StrCat("{\"evidence_sha256\":\"", Text(fields, "evidence_sha256"),
                          "\",\"expires_ms\":", *expires, ",\"fingerprint\":\"", fingerprint,
                          "\",\"head\":\"", record.head, "\",\"issued_ms\":", *issued,
                          ",\"key_id\":\"", key_id, "\",\"model_id\":\"", Text(fields, "model_id"),
                          "\",\"shared\":\"", record.shared, "\",", signed_part, "\"status\":\"",
                          status, "\",\"tail\":\"", record.tail, "\",\"version\":2}");
    };
    if (written(absl::StrCat("\"signature\":\"", absl::Base64Escape(signature), "\",")) != line) {
      return NoRecord(number, "it is not in canonical form, or has other fields");
    }
    if (!keys->Verify(key_id, absl::StrCat(kPurpose, written("")), signature)) {
      return NoRecord(number, absl::StrCat("none of --mixture_keys made the signature of key ",
                                           key_id, "; give the certifier's public key"));
    }
    if (record.head.empty() || record.tail.empty() || record.shared.empty() ||
        record.head == record.tail ||
        fingerprint != MixedFingerprint(record.shared, record.head, record.tail) ||
        (status != "certified" && status != "revoked")) {
      return NoRecord(number, "it is not that of a mixture of two recipes");
    }
    record.is_certified = status == "certified";
    record.issued_ms = *issued;
    record.expires_ms = *expires;
    Record& newest = mixtures.newest_[fingerprint];
    if (std::tie(newest.issued_ms, newest.id) < std::tie(record.issued_ms, record.id)) {
      newest = std::move(record);
    }
  }
  return mixtures;
}

absl::Status Mixtures::Check(const std::string& fingerprint, const Capability& capability,
                             uint32_t hop_index, uint32_t hop_count, absl::Time now) const {
  const std::string& own = capability.recipe_fingerprint;
  const auto refused = [&](absl::string_view why) {
    return MakeError(
        v1::REASON_RECIPE_MISMATCH,
        absl::StrCat("expected recipe ", own, LaneOf(capability), ", got ", fingerprint, why));
  };
  const auto found = newest_.find(fingerprint);
  if (found == newest_.end()) {
    return refused(
        "; route to workers that run one recipe, or give each worker of a mixture of two lanes its "
        "certification record (--mixtures)");
  }
  const Record& record = found->second;
  const std::string lanes =
      absl::StrCat(", a mixture of recipe ", record.head, " before recipe ", record.tail);
  if (!record.is_certified) {
    return refused(absl::StrCat(lanes, ", which record ", record.id,
                                " revokes; route to workers that run one recipe"));
  }
  if (record.expires_ms != 0 && now >= absl::FromUnixMillis(record.expires_ms)) {
    return refused(absl::StrCat(lanes, ", whose record ", record.id,
                                " has expired; measure and sign the mixture anew"));
  }
  if (own != record.head && own != record.tail) {
    return refused(absl::StrCat(lanes, "; route to workers of these two"));
  }
  if (const std::string shared = SharedFingerprint(capability.recipe); shared != record.shared) {
    return refused(absl::StrCat(lanes, " that have ", record.shared, " in common, this one has ",
                                shared, "; lanes may differ in backend, build and device alone"));
  }
  if (own == record.head ? hop_index + 1 == hop_count : hop_index == 0) {
    return refused(absl::StrCat(lanes, ", in which this worker can not be hop ", hop_index, " of ",
                                hop_count, "; keep the order of the two lanes"));
  }
  return absl::OkStatus();
}

}  // namespace meshnet::worker

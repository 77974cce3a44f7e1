#include "cc/worker/mixture_records.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/worker/mixtures.h"

namespace meshnet::worker {

std::string SignMixture(const Ed25519Signer& signer, const MixtureRecord& record) {
  const std::string before = absl::StrCat(
      "{\"evidence_sha256\":\"", std::string(64, 'e'), "\",\"expires_ms\":", record.expires_ms,
      ",\"fingerprint\":\"", MixedFingerprint(record.shared, record.head, record.tail),
      "\",\"head\":\"", record.head, "\",\"issued_ms\":", record.issued_ms, ",\"key_id\":\"",
      signer.KeyId(), "\",\"model_id\":\"model\",\"shared\":\"", record.shared, "\",");
  const std::string after = absl::StrCat("\"status\":\"", record.status, "\",\"tail\":\"",
                                         record.tail, "\",\"version\":2}");
  const std::string signature =
      signer.Sign(absl::StrCat("meshnet certification v1\n", before, after));
  return absl::StrCat(before, "\"signature\":\"", absl::Base64Escape(signature), "\",", after);
}

}  // namespace meshnet::worker

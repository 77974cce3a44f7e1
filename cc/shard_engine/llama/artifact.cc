#include "cc/shard_engine/llama/artifact.h"

#include <fcntl.h>
#include <openssl/evp.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "ggml.h"
#include "gguf.h"

namespace meshnet {
namespace {

constexpr size_t kReadBytes = 1 << 20;

struct Architecture {
  absl::string_view name;
  // Entries of `name`.* that have to be uint32 above 0: llama.cpp divides by them or asserts on
  // them.
  std::vector<absl::string_view> required;
};

const std::vector<Architecture>& Architectures() {
  static const auto* architectures = new std::vector<Architecture>{
      {"llama", {"block_count", "embedding_length", "attention.head_count"}},
      {"deepseek4",
       {"block_count", "embedding_length", "attention.head_count", "attention.key_length",
        "attention.sliding_window", "attention.output_group_count", "attention.output_lora_rank",
        "attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k",
        "hyper_connection.count", "expert_count", "expert_used_count"}},
  };
  return *architectures;
}

const Architecture* FindArchitecture(absl::string_view name) {
  for (const Architecture& architecture : Architectures()) {
    if (architecture.name == name) return &architecture;
  }
  return nullptr;
}

absl::Status Unreadable(const std::string& path, absl::string_view what) {
  return MakeError(v1::REASON_ARTIFACT_UNREADABLE,
                   absl::StrCat("cannot read ", path, ": ", what, "; give a readable GGUF file"));
}

absl::Status Invalid(const std::string& path, absl::string_view what) {
  return MakeError(v1::REASON_ARTIFACT_INVALID,
                   absl::StrCat(path, " is no model that can be served: ", what));
}

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) { EVP_DigestInit_ex(context_, EVP_sha256(), nullptr); }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(const void* data, size_t size) { EVP_DigestUpdate(context_, data, size); }

  // With its length, so that neighbours cannot run into each other.
  void UpdateText(absl::string_view text) {
    const uint64_t size = text.size();
    Update(&size, sizeof(size));
    Update(text.data(), text.size());
  }

  std::string Hex() {
    std::string digest(EVP_MAX_MD_SIZE, '\0');
    unsigned int size = 0;
    EVP_DigestFinal_ex(context_, reinterpret_cast<unsigned char*>(&digest[0]), &size);
    digest.resize(size);
    return absl::BytesToHexString(digest);
  }

 private:
  EVP_MD_CTX* context_;
};

struct GgufDeleter {
  void operator()(gguf_context* context) const { gguf_free(context); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;

// Null when the header does not parse.
GgufPtr OpenGguf(const std::string& path) {
  gguf_init_params params = {};
  params.no_alloc = true;
  // A header that declares more entries than there is memory for throws.
  try {
    return GgufPtr(gguf_init_from_file(path.c_str(), params));
  } catch (const std::exception&) {
    return nullptr;
  }
}

size_t ScalarSize(gguf_type type) {
  switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_BOOL:
      return 1;
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
      return 2;
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
    case GGUF_TYPE_FLOAT64:
      return 8;
    default:
      return 4;
  }
}

void HashValue(const gguf_context* gguf, int64_t id, Sha256* hash) {
  gguf_type type = gguf_get_kv_type(gguf, id);
  const auto kind = static_cast<uint32_t>(type);
  hash->Update(&kind, sizeof(kind));
  if (type == GGUF_TYPE_STRING) {
    hash->UpdateText(gguf_get_val_str(gguf, id));
    return;
  }
  if (type != GGUF_TYPE_ARRAY) {
    hash->Update(gguf_get_val_data(gguf, id), ScalarSize(type));
    return;
  }
  type = gguf_get_arr_type(gguf, id);
  const uint64_t count = gguf_get_arr_n(gguf, id);
  hash->Update(&count, sizeof(count));
  if (type == GGUF_TYPE_STRING) {
    for (uint64_t i = 0; i < count; ++i) hash->UpdateText(gguf_get_arr_str(gguf, id, i));
  } else {
    hash->Update(gguf_get_arr_data(gguf, id), count * ScalarSize(type));
  }
}

std::string TokenizerSha256(const gguf_context* gguf) {
  std::map<std::string, int64_t> keys;
  for (int64_t id = 0; id < gguf_get_n_kv(gguf); ++id) {
    const char* key = gguf_get_key(gguf, id);
    if (absl::StartsWith(key, "tokenizer.")) keys[key] = id;
  }
  Sha256 hash;
  for (const auto& [key, id] : keys) {
    hash.UpdateText(key);
    HashValue(gguf, id, &hash);
  }
  return hash.Hex();
}

// The value of an unsigned 32-bit entry; 0 when it is absent or of another type.
uint32_t Uint32Of(const gguf_context* gguf, const std::string& key) {
  const int64_t id = gguf_find_key(gguf, key.c_str());
  if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_UINT32) return 0;
  return gguf_get_val_u32(gguf, id);
}

std::string StringOf(const gguf_context* gguf, const char* key) {
  const int64_t id = gguf_find_key(gguf, key);
  if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_STRING) return "";
  return gguf_get_val_str(gguf, id);
}

absl::Status CheckReadable(const std::string& path) {
  struct stat info = {};
  if (stat(path.c_str(), &info) != 0) return Unreadable(path, std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return Unreadable(path, "not a regular file");
  if (access(path.c_str(), R_OK) != 0) return Unreadable(path, std::strerror(errno));
  return absl::OkStatus();
}

}  // namespace

bool IsServedArchitecture(absl::string_view architecture) {
  return FindArchitecture(architecture) != nullptr;
}

absl::StatusOr<ArtifactHeader> ReadArtifactHeader(const std::string& path) {
  const absl::Status readable = CheckReadable(path);
  if (!readable.ok()) return readable;
  const GgufPtr gguf = OpenGguf(path);
  if (gguf == nullptr) return Invalid(path, "expected the GGUF format, its header does not parse");
  ArtifactHeader header;
  header.architecture = StringOf(gguf.get(), "general.architecture");
  if (header.architecture.empty()) return Invalid(path, "general.architecture is missing");
  const Architecture* architecture = FindArchitecture(header.architecture);
  if (architecture == nullptr) return header;
  const auto key = [&](absl::string_view name) {
    return absl::StrCat(header.architecture, ".", name);
  };
  for (const absl::string_view name : architecture->required) {
    if (Uint32Of(gguf.get(), key(name)) == 0) {
      return Invalid(path, absl::StrCat("expected ", key(name), " to be a uint32 above 0"));
    }
  }
  header.embedding = Uint32Of(gguf.get(), key("embedding_length"));
  header.streams = std::max(1u, Uint32Of(gguf.get(), key("hyper_connection.count")));
  const uint32_t blocks = Uint32Of(gguf.get(), key("block_count"));
  const uint32_t mtp_blocks = Uint32Of(gguf.get(), key("nextn_predict_layers"));
  if (mtp_blocks >= blocks) {
    return Invalid(path, absl::StrCat("all ", blocks, " of its layers are for multi-token ",
                                      "prediction (", key("nextn_predict_layers"), ")"));
  }
  header.layers = blocks - mtp_blocks;
  const std::string tokenizer = StringOf(gguf.get(), "tokenizer.ggml.model");
  if (tokenizer.empty() || tokenizer == "none") {
    return Invalid(path, "it has no tokenizer (tokenizer.ggml.model)");
  }
  const int64_t split = gguf_find_key(gguf.get(), "split.count");
  if (split >= 0 && gguf_get_kv_type(gguf.get(), split) == GGUF_TYPE_UINT16 &&
      gguf_get_val_u16(gguf.get(), split) > 1) {
    return Invalid(path, "it is one part of a split model; join the parts into one file");
  }
  header.tokenizer_sha256 = TokenizerSha256(gguf.get());
  return header;
}

absl::StatusOr<std::string> FileSha256(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Unreadable(path, std::strerror(errno));
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
  posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  std::vector<char> buffer(kReadBytes);
  Sha256 hash;
  while (true) {
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Unreadable(path, std::strerror(errno));
    if (got == 0) return hash.Hex();
    hash.Update(buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace meshnet

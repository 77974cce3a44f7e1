#include "cc/shard_engine/llama/artifact.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "cc/common/status.h"
#include "cc/shard_engine/llama/digest.h"
#include "cc/shard_engine/llama/gguf_header.h"
#include "ggml.h"
#include "gguf.h"

namespace meshnet {
namespace {

constexpr size_t kReadBytes = 1 << 20;
constexpr uint32_t kMaxParts = 1 << 10;
constexpr char kSplitCount[] = "split.count";
constexpr char kSplitNumber[] = "split.no";
constexpr char kSplitTensors[] = "split.tensors.count";

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
                   absl::StrCat("cannot read ", path, ": ", what,
                                "; give a readable GGUF file, and all parts of a split set"));
}

absl::Status Invalid(const std::string& path, absl::string_view what) {
  return MakeError(v1::REASON_ARTIFACT_INVALID,
                   absl::StrCat(path, " is no model that can be served: ", what));
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

// As it stands in the file: what python/meshnet_gguf/gguf_file.py hashes.
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
  const auto element = static_cast<uint32_t>(type);
  hash->Update(&element, sizeof(element));
  const uint64_t count = gguf_get_arr_n(gguf, id);
  hash->Update(&count, sizeof(count));
  if (type == GGUF_TYPE_STRING) {
    for (uint64_t i = 0; i < count; ++i) hash->UpdateText(gguf_get_arr_str(gguf, id, i));
  } else {
    hash->Update(gguf_get_arr_data(gguf, id), count * ScalarSize(type));
  }
}

std::string ValueSha256(const gguf_context* gguf, int64_t id) {
  Sha256 hash;
  HashValue(gguf, id, &hash);
  return hash.Hex();
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

// The elements of an array of 32-bit whole numbers; empty when it is absent or of another type.
std::vector<uint32_t> Uint32sOf(const gguf_context* gguf, const std::string& key) {
  const int64_t id = gguf_find_key(gguf, key.c_str());
  if (id < 0 || gguf_get_kv_type(gguf, id) != GGUF_TYPE_ARRAY) return {};
  const gguf_type type = gguf_get_arr_type(gguf, id);
  if (type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) return {};
  const auto* values = static_cast<const uint32_t*>(gguf_get_arr_data(gguf, id));
  return {values, values + gguf_get_arr_n(gguf, id)};
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

// A file with its header.
struct Part {
  std::string path;
  GgufPtr gguf;
};

absl::StatusOr<Part> ReadPart(const std::string& path) {
  const absl::Status readable = CheckReadable(path);
  if (!readable.ok()) return readable;
  Part part = {path, OpenGguf(path)};
  if (part.gguf == nullptr) {
    return Invalid(path, "expected the GGUF format, its header does not parse");
  }
  return part;
}

// An entry of a split set; `absent` when it is not there.
absl::StatusOr<uint32_t> SplitValue(const Part& part, const char* key, uint32_t absent) {
  const int64_t id = gguf_find_key(part.gguf.get(), key);
  if (id < 0) return absent;
  if (gguf_get_kv_type(part.gguf.get(), id) == GGUF_TYPE_UINT16) {
    return gguf_get_val_u16(part.gguf.get(), id);
  }
  return Invalid(part.path, absl::StrCat("expected ", key, " to be a uint16"));
}

std::string PartSuffix(uint32_t number, uint32_t count) {
  return absl::StrFormat("-%05d-of-%05d.gguf", number + 1, count);
}

// A file that is named like a part of the set and is none: the set was made anew over an older one.
absl::Status CheckNoOtherParts(const std::string& prefix, uint32_t count) {
  std::set<std::string> expected;
  for (uint32_t number = 0; number < count; ++number) {
    expected.insert(std::filesystem::path(prefix + PartSuffix(number, count)).filename());
  }
  const std::string any_number = PartSuffix(0, count);
  const std::string end = any_number.substr(any_number.find("-of-"));
  const std::string start = std::filesystem::path(prefix + "-").filename();
  const std::filesystem::path folder = std::filesystem::path(prefix).parent_path();
  std::error_code error;
  for (std::filesystem::directory_iterator it(folder.empty() ? "." : folder, error), last;
       !error && it != last; it.increment(error)) {
    const std::string name = it->path().filename();
    if (name.size() == expected.begin()->size() && absl::StartsWith(name, start) &&
        absl::EndsWith(name, end) && expected.count(name) == 0) {
      return Invalid(it->path(), absl::StrCat("expected parts 1 to ", count,
                                              " of the split set and no other; remove the file or "
                                              "fetch the set again"));
    }
  }
  if (error) return Unreadable(prefix, error.message());
  return absl::OkStatus();
}

// That a part other than the first says nothing else than the first one where both say something.
absl::Status CheckAgrees(const Part& part, const Part& first) {
  for (int64_t id = 0; id < gguf_get_n_kv(part.gguf.get()); ++id) {
    const char* key = gguf_get_key(part.gguf.get(), id);
    const int64_t of_first = gguf_find_key(first.gguf.get(), key);
    if (of_first < 0 || absl::string_view(key) == kSplitNumber) continue;
    if (ValueSha256(part.gguf.get(), id) != ValueSha256(first.gguf.get(), of_first)) {
      return Invalid(part.path, absl::StrCat("its ", key, " is not that of ", first.path,
                                             "; the parts are of different sets"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckTensors(const std::vector<Part>& parts) {
  std::set<std::string> names;
  for (const Part& part : parts) {
    for (int64_t id = 0; id < gguf_get_n_tensors(part.gguf.get()); ++id) {
      const char* name = gguf_get_tensor_name(part.gguf.get(), id);
      if (!names.insert(name).second) {
        return Invalid(part.path, absl::StrCat("the tensor ", name, " is in another part, too"));
      }
    }
  }
  const Part& first = parts.front();
  const int64_t id = gguf_find_key(first.gguf.get(), kSplitTensors);
  if (id < 0 || gguf_get_kv_type(first.gguf.get(), id) != GGUF_TYPE_INT32) {
    return Invalid(first.path, absl::StrCat("expected ", kSplitTensors, " to be an int32"));
  }
  const int32_t declared = gguf_get_val_i32(first.gguf.get(), id);
  if (declared != static_cast<int64_t>(names.size())) {
    return Invalid(first.path, absl::StrCat("expected ", declared, " tensors in all parts, got ",
                                            names.size()));
  }
  return absl::OkStatus();
}

// The file, or all parts of the split set that it belongs to, in their order.
absl::StatusOr<std::vector<Part>> ReadParts(const std::string& path) {
  std::vector<Part> parts;
  absl::StatusOr<Part> given = ReadPart(path);
  if (!given.ok()) return given.status();
  const absl::StatusOr<uint32_t> count = SplitValue(*given, kSplitCount, 1);
  if (!count.ok()) return count.status();
  if (*count <= 1) {
    parts.push_back(*std::move(given));
    return parts;
  }
  if (*count > kMaxParts) {
    return Invalid(path, absl::StrCat("expected at most ", kMaxParts, " parts, got ", *count));
  }
  const absl::StatusOr<uint32_t> given_number = SplitValue(*given, kSplitNumber, *count);
  if (!given_number.ok()) return given_number.status();
  const std::string suffix = PartSuffix(*given_number, *count);
  if (*given_number >= *count || !absl::EndsWith(path, suffix)) {
    return Invalid(path,
                   absl::StrCat("by its keys it is part ", *given_number + 1, " of ", *count,
                                ", and parts are found by their names: expected NAME", suffix));
  }
  const std::string prefix = path.substr(0, path.size() - suffix.size());
  for (uint32_t number = 0; number < *count; ++number) {
    absl::StatusOr<Part> part = ReadPart(prefix + PartSuffix(number, *count));
    if (!part.ok()) return part.status();
    const absl::StatusOr<uint32_t> found = SplitValue(*part, kSplitNumber, *count);
    if (!found.ok()) return found.status();
    const absl::StatusOr<uint32_t> of = SplitValue(*part, kSplitCount, 1);
    if (!of.ok()) return of.status();
    if (*found != number || *of != *count) {
      return Invalid(part->path,
                     absl::StrCat("expected part ", number + 1, " of ", *count,
                                  ", by its keys it is part ", *found + 1, " of ", *of));
    }
    parts.push_back(*std::move(part));
    const absl::Status agrees = CheckAgrees(parts.back(), parts.front());
    if (!agrees.ok()) return agrees;
  }
  absl::Status status = CheckNoOtherParts(prefix, *count);
  if (status.ok()) status = CheckTensors(parts);
  if (!status.ok()) return status;
  return parts;
}

absl::Status HashFile(const std::string& path, Sha256* hash) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Unreadable(path, std::strerror(errno));
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
#if defined(POSIX_FADV_SEQUENTIAL)  // macOS has none, and reads ahead by itself
  posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
#endif
  std::vector<char> buffer(kReadBytes);
  while (true) {
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Unreadable(path, std::strerror(errno));
    if (got == 0) return absl::OkStatus();
    hash->Update(buffer.data(), static_cast<size_t>(got));
  }
}

}  // namespace

bool IsServedArchitecture(absl::string_view architecture) {
  return FindArchitecture(architecture) != nullptr;
}

absl::StatusOr<ArtifactHeader> ReadArtifactHeader(const std::string& path) {
  const absl::StatusOr<std::vector<Part>> parts = ReadParts(path);
  if (!parts.ok()) return parts.status();
  const gguf_context* gguf = parts->front().gguf.get();
  ArtifactHeader header;
  for (const Part& part : *parts) header.files.push_back(part.path);
  header.architecture = StringOf(gguf, "general.architecture");
  if (header.architecture.empty()) return Invalid(path, "general.architecture is missing");
  const Architecture* architecture = FindArchitecture(header.architecture);
  if (architecture == nullptr) return header;
  const auto key = [&](absl::string_view name) {
    return absl::StrCat(header.architecture, ".", name);
  };
  for (const absl::string_view name : architecture->required) {
    if (Uint32Of(gguf, key(name)) == 0) {
      return Invalid(path, absl::StrCat("expected ", key(name), " to be a uint32 above 0"));
    }
  }
  header.embedding = Uint32Of(gguf, key("embedding_length"));
  header.streams = std::max(1u, Uint32Of(gguf, key("hyper_connection.count")));
  header.key_length = Uint32Of(gguf, key("attention.key_length"));
  header.indexer_key_length = Uint32Of(gguf, key("attention.indexer.key_length"));
  header.window = Uint32Of(gguf, key("attention.sliding_window"));
  header.compression_ratios = Uint32sOf(gguf, key("attention.compress_ratios"));
  const uint32_t blocks = Uint32Of(gguf, key("block_count"));
  const uint32_t mtp_blocks = Uint32Of(gguf, key("nextn_predict_layers"));
  if (mtp_blocks >= blocks) {
    return Invalid(path, absl::StrCat("all ", blocks, " of its layers are for multi-token ",
                                      "prediction (", key("nextn_predict_layers"), ")"));
  }
  header.layers = blocks - mtp_blocks;
  const std::string tokenizer = StringOf(gguf, "tokenizer.ggml.model");
  if (tokenizer.empty() || tokenizer == "none") {
    return Invalid(path, "it has no tokenizer (tokenizer.ggml.model)");
  }
  header.tokenizer_sha256 = TokenizerSha256(gguf);
  return header;
}

absl::StatusOr<std::string> ArtifactSha256(const std::vector<std::string>& files) {
  std::string identity;
  Sha256 lines;
  for (const std::string& file : files) {
    Sha256 hash;
    const absl::Status status = HashFile(file, &hash);
    if (!status.ok()) return status;
    identity = hash.Hex();
    const std::string line = absl::StrCat(identity, "\n");
    lines.Update(line.data(), line.size());
  }
  return files.size() == 1 ? identity : lines.Hex();
}

}  // namespace meshnet

#include "cc/shard_engine/llama/manifest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cc/common/status.h"
#include "cc/shard_engine/llama/digest.h"
#include "cc/shard_engine/llama/gguf_header.h"
#include "gguf.h"
#include "google/protobuf/util/json_util.h"
#include "proto/meshnet/artifact/v1/manifest.pb.h"

namespace meshnet {
namespace {

constexpr char kSchema[] = "meshnet.manifest/1";
constexpr char kProvisionedName[] = "provisioned.json";
constexpr size_t kMaxManifestBytes = size_t{1} << 26;
constexpr uint64_t kMinChunkBytes = uint64_t{1} << 10;
constexpr uint64_t kMaxChunkBytes = uint64_t{1} << 28;
constexpr uint64_t kMaxFileBytes = uint64_t{1} << 50;
constexpr int kMaxFiles = 1 << 10;
constexpr size_t kReadBytes = 1 << 20;

absl::Status Invalid(absl::string_view where, absl::string_view what) {
  return MakeError(
      v1::REASON_MANIFEST_INVALID,
      absl::StrCat(where, " is no usable manifest: ", what, "; make one with `meshnet manifest`"));
}

absl::Status Unreadable(const std::string& path, absl::string_view what) {
  return MakeError(v1::REASON_ARTIFACT_UNREADABLE, absl::StrCat("cannot read ", path, ": ", what));
}

absl::Status Mismatch(absl::string_view what) {
  return MakeError(
      v1::REASON_ARTIFACT_MISMATCH,
      absl::StrCat(what, "; `meshnet provision --recheck` finds and mends what is damaged"));
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Unreadable(path, std::strerror(errno));
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
  std::string content;
  std::vector<char> buffer(kReadBytes);
  while (content.size() <= kMaxManifestBytes) {
    const ssize_t got = read(fd, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Unreadable(path, std::strerror(errno));
    if (got == 0) return content;
    content.append(buffer.data(), static_cast<size_t>(got));
  }
  return Unreadable(path, absl::StrCat("it has more than ", kMaxManifestBytes, " bytes"));
}

bool IsSha256(absl::string_view text) {
  return text.size() == 64 && std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f');
         });
}

bool IsName(absl::string_view name) {
  return absl::EndsWith(name, ".gguf") && name.front() != '.' && name.size() <= 200 &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(c) || absl::StrContains("._+=@-", c);
         });
}

absl::StatusOr<ManifestFile> ParseFile(const artifact::v1::File& proto, uint64_t chunk_bytes,
                                       absl::string_view where) {
  if (!IsName(proto.name())) {
    return Invalid(where,
                   "expected a file's name of letters, digits and ._+=@- that ends in .gguf");
  }
  if (proto.bytes() == 0 || proto.bytes() > kMaxFileBytes || proto.header_bytes() == 0 ||
      proto.header_bytes() > proto.bytes()) {
    return Invalid(where, absl::StrCat(proto.name(), ": sizes out of bounds"));
  }
  const uint64_t expected = (proto.bytes() + chunk_bytes - 1) / chunk_bytes;
  if (static_cast<uint64_t>(proto.chunks_size()) != expected ||
      !std::all_of(proto.chunks().begin(), proto.chunks().end(), IsSha256)) {
    return Invalid(where,
                   absl::StrCat(proto.name(), ": expected the SHA-256 of ", expected, " chunks"));
  }
  ManifestFile file;
  file.name = proto.name();
  file.bytes = proto.bytes();
  file.header_bytes = proto.header_bytes();
  file.chunks.assign(proto.chunks().begin(), proto.chunks().end());
  return file;
}

std::string InFolder(const std::string& folder, absl::string_view name) {
  return folder.empty() ? std::string(name) : absl::StrCat(folder, "/", name);
}

// The first of the errors that threads report.
class FirstError {
 public:
  void Report(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    if (status_.ok()) status_ = status;
    failed_.store(true, std::memory_order_relaxed);
  }
  bool failed() const { return failed_.load(std::memory_order_relaxed); }
  absl::Status status() const {
    absl::MutexLock lock(&mu_);
    return status_;
  }

 private:
  std::atomic<bool> failed_{false};
  mutable absl::Mutex mu_;
  absl::Status status_ ABSL_GUARDED_BY(mu_);
};

// Chunks to compare: file and number.
using Chunks = std::set<std::pair<size_t, uint64_t>>;

void AddRange(const Manifest& manifest, size_t file, uint64_t offset, uint64_t length,
              Chunks* chunks) {
  if (length == 0) return;
  const uint64_t last = (offset + length - 1) / manifest.chunk_bytes;
  for (uint64_t chunk = offset / manifest.chunk_bytes; chunk <= last; ++chunk) {
    chunks->insert({file, chunk});
  }
}

absl::Status VerifyChunk(const Manifest& manifest, const std::string& path, size_t index,
                         uint64_t chunk, int fd, std::vector<char>* buffer) {
  const ManifestFile& file = manifest.files[index];
  uint64_t offset = chunk * manifest.chunk_bytes;
  const uint64_t end = std::min(offset + manifest.chunk_bytes, file.bytes);
  Sha256 hash;
  while (offset < end) {
    const size_t want = std::min<uint64_t>(buffer->size(), end - offset);
    const ssize_t got = pread(fd, buffer->data(), want, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Unreadable(path, std::strerror(errno));
    if (got == 0) return Unreadable(path, absl::StrCat("it ends at ", offset));
    hash.Update(buffer->data(), static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  const std::string found = hash.Hex();
  if (found == file.chunks[chunk]) return absl::OkStatus();
  return Mismatch(absl::StrCat(path, ", chunk ", chunk, ": expected SHA-256 ", file.chunks[chunk],
                               ", got ", found));
}

// Hashes on several threads: it takes as long as a disk or the CPUs allow, not one of them.
absl::Status VerifyChunks(const Manifest& manifest, const std::vector<std::string>& paths,
                          const Chunks& chunks, uint32_t threads) {
  std::vector<int> fds;
  const auto close_fds = absl::MakeCleanup([&fds] {
    for (const int fd : fds) close(fd);
  });
  for (const std::string& path : paths) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return Unreadable(path, std::strerror(errno));
    fds.push_back(fd);
  }
  const std::vector<std::pair<size_t, uint64_t>> work(chunks.begin(), chunks.end());
  std::atomic<size_t> next{0};
  FirstError first;
  const auto run = [&] {
    std::vector<char> buffer(std::min<uint64_t>(kReadBytes, manifest.chunk_bytes));
    for (size_t i = next++; i < work.size() && !first.failed(); i = next++) {
      const auto& [file, chunk] = work[i];
      const absl::Status status =
          VerifyChunk(manifest, paths[file], file, chunk, fds[file], &buffer);
      if (!status.ok()) first.Report(status);
    }
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < std::min<size_t>(std::max(threads, 1u), work.size()); ++i) {
    others.emplace_back(run);
  }
  run();
  for (std::thread& other : others) other.join();
  return first.status();
}

// That the set's record, where there is one, has these chunks: what was never fetched is a hole,
// and to say so is more use than to name a wrong hash. Otherwise the record is nothing to trust:
// every chunk is compared.
absl::Status CheckFetched(const Manifest& manifest, const std::string& folder, const Chunks& chunks,
                          const LayerRange& range) {
  const std::string path = InFolder(folder, kProvisionedName);
  const absl::StatusOr<std::string> json = ReadSmallFile(path);
  if (!json.ok()) return absl::OkStatus();
  artifact::v1::Provisioned record;
  if (!google::protobuf::util::JsonStringToMessage(*json, &record).ok() ||
      record.artifact_sha256() != manifest.artifact_sha256) {
    return absl::OkStatus();
  }
  std::map<absl::string_view, const artifact::v1::ProvisionedFile*> fetched;
  for (const artifact::v1::ProvisionedFile& file : record.files()) fetched[file.name()] = &file;
  uint64_t missing = 0;
  for (const auto& [index, chunk] : chunks) {
    const ManifestFile& file = manifest.files[index];
    const auto of_file = fetched.find(file.name);
    bool found = false;
    for (int i = 0; of_file != fetched.end() && i + 1 < of_file->second->chunks_size(); i += 2) {
      const artifact::v1::ProvisionedFile& runs = *of_file->second;
      found = found || (runs.chunks(i) <= chunk && chunk < runs.chunks(i + 1));
    }
    if (!found) {
      missing += std::min(manifest.chunk_bytes, file.bytes - chunk * manifest.chunk_bytes);
    }
  }
  if (missing == 0) return absl::OkStatus();
  return MakeError(
      v1::REASON_ARTIFACT_INCOMPLETE,
      absl::StrCat("expected what layers [", range.begin, ", ", range.end, ") need in ", folder,
                   ", ", missing, " bytes of it were not fetched; run `meshnet provision --layers ",
                   range.begin, ":", range.end, "`"));
}

// The layer in a name such as blk.12.attn_q.weight; -1 without one.
int64_t LayerOf(absl::string_view name) {
  constexpr absl::string_view kPrefix = "blk.";
  if (!absl::StartsWith(name, kPrefix)) return -1;
  name.remove_prefix(kPrefix.size());
  const size_t dot = name.find('.');
  uint32_t layer = 0;
  if (dot == absl::string_view::npos || !absl::SimpleAtoi(name.substr(0, dot), &layer)) return -1;
  return layer;
}

// Whether a stage may read the tensor. Only what certainly belongs to other stages is left out, so
// that nothing can be computed with that was not compared.
bool IsNeeded(absl::string_view name, const LayerRange& range, uint32_t model_layers, bool tied) {
  const bool head = range.begin == 0;
  const bool tail = range.end == model_layers;
  const int64_t layer = LayerOf(name);
  if (layer >= 0)
    return (layer >= range.begin && layer < range.end) || (tail && layer >= range.end);
  if (absl::StartsWith(name, "output")) return tail;
  for (const absl::string_view input : {"token_embd", "position_embd", "token_types"}) {
    if (absl::StartsWith(name, input)) return head || (tail && tied);
  }
  return true;
}

}  // namespace

absl::StatusOr<Manifest> ParseManifest(absl::string_view json, absl::string_view where) {
  artifact::v1::Manifest proto;
  const auto parsed = google::protobuf::util::JsonStringToMessage(std::string(json), &proto);
  if (!parsed.ok()) {
    return Invalid(where, absl::string_view(parsed.message().data(), parsed.message().size()));
  }
  if (proto.schema() != kSchema) {
    return Invalid(where, absl::StrCat("expected the schema ", kSchema));
  }
  if (!IsSha256(proto.tokenizer().sha256())) {
    return Invalid(where, "expected the tokenizer's SHA-256");
  }
  if (proto.chunk_bytes() < kMinChunkBytes || proto.chunk_bytes() > kMaxChunkBytes ||
      (proto.chunk_bytes() & (proto.chunk_bytes() - 1)) != 0) {
    return Invalid(where, absl::StrCat("expected chunk_bytes to be a power of two of ",
                                       kMinChunkBytes, " to ", kMaxChunkBytes));
  }
  if (proto.files_size() < 1 || proto.files_size() > kMaxFiles) {
    return Invalid(where, absl::StrCat("expected 1 to ", kMaxFiles, " files"));
  }
  Manifest manifest;
  manifest.tokenizer_sha256 = proto.tokenizer().sha256();
  manifest.chunk_bytes = proto.chunk_bytes();
  for (const artifact::v1::File& file : proto.files()) {
    absl::StatusOr<ManifestFile> checked = ParseFile(file, manifest.chunk_bytes, where);
    if (!checked.ok()) return checked.status();
    manifest.files.push_back(*std::move(checked));
  }
  Sha256 hash;
  hash.Update(json.data(), json.size());
  manifest.artifact_sha256 = hash.Hex();
  return manifest;
}

absl::StatusOr<Manifest> ReadManifest(const std::string& path) {
  const absl::StatusOr<std::string> json = ReadSmallFile(path);
  if (!json.ok()) return json.status();
  return ParseManifest(*json, path);
}

absl::StatusOr<std::vector<std::string>> VerifyHeaders(const Manifest& manifest,
                                                       const std::string& folder,
                                                       uint32_t threads) {
  std::vector<std::string> paths;
  Chunks headers;
  for (size_t i = 0; i < manifest.files.size(); ++i) {
    const ManifestFile& file = manifest.files[i];
    const std::string path = InFolder(folder, file.name);
    struct stat info = {};
    if (stat(path.c_str(), &info) != 0) {
      if (errno != ENOENT) return Unreadable(path, std::strerror(errno));
      return MakeError(
          v1::REASON_ARTIFACT_INCOMPLETE,
          absl::StrCat("expected the ", manifest.files.size(), " files of the manifest, ", path,
                       " is missing; `meshnet provision` fetches it"));
    }
    if (!S_ISREG(info.st_mode)) return Unreadable(path, "not a regular file");
    if (static_cast<uint64_t>(info.st_size) != file.bytes) {
      return Mismatch(absl::StrCat(path, ": expected ", file.bytes, " bytes by the manifest, got ",
                                   info.st_size));
    }
    AddRange(manifest, i, 0, file.header_bytes, &headers);
    paths.push_back(path);
  }
  const absl::Status status = VerifyChunks(manifest, paths, headers, threads);
  if (!status.ok()) return status;
  return paths;
}

absl::StatusOr<std::set<std::string>> VerifyLayers(const Manifest& manifest,
                                                   const std::vector<std::string>& paths,
                                                   const LayerRange& range, uint32_t model_layers,
                                                   uint32_t threads) {
  std::vector<GgufPtr> headers;
  bool tied = true;
  for (const std::string& path : paths) {
    headers.push_back(OpenGguf(path));
    if (headers.back() == nullptr) {
      return MakeError(v1::REASON_ARTIFACT_INVALID,
                       absl::StrCat(path, ": its header does not parse"));
    }
    if (gguf_find_tensor(headers.back().get(), "output.weight") >= 0) tied = false;
  }
  std::set<std::string> verified;
  Chunks chunks;
  for (size_t i = 0; i < paths.size(); ++i) {
    const gguf_context* gguf = headers[i].get();
    const ManifestFile& file = manifest.files[i];
    const int64_t count = gguf_get_n_tensors(gguf);
    const uint64_t data = gguf_get_data_offset(gguf);
    // Without tensors the header may end before its padding would.
    if (count == 0) AddRange(manifest, i, 0, file.bytes, &chunks);
    if (count > 0 && data != file.header_bytes) {
      return Mismatch(absl::StrCat(paths[i], ": expected a header of ", file.header_bytes,
                                   " bytes by the manifest, got ", data));
    }
    for (int64_t id = 0; id < count; ++id) {
      if (!IsNeeded(gguf_get_tensor_name(gguf, id), range, model_layers, tied)) continue;
      const uint64_t offset = data + gguf_get_tensor_offset(gguf, id);
      const uint64_t size = gguf_get_tensor_size(gguf, id);
      if (offset > file.bytes || size > file.bytes - offset) {
        return MakeError(v1::REASON_ARTIFACT_INVALID,
                         absl::StrCat(paths[i], ": the tensor ", gguf_get_tensor_name(gguf, id),
                                      " ends behind the file"));
      }
      AddRange(manifest, i, offset, size, &chunks);
      verified.insert(gguf_get_tensor_name(gguf, id));
    }
  }
  const size_t slash = paths.front().rfind('/');
  const std::string folder = slash == std::string::npos ? "" : paths.front().substr(0, slash);
  absl::Status status = CheckFetched(manifest, folder, chunks, range);
  if (status.ok()) status = VerifyChunks(manifest, paths, chunks, threads);
  if (!status.ok()) return status;
  return verified;
}

}  // namespace meshnet

#include "cc/worker/tokenizer_service.h"

#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "cc/common/status.h"
#include "cc/worker/unary_call.h"
#include "proto/meshnet/shard/v1/tokenizer.pb.h"

namespace meshnet::worker {
namespace {

constexpr uint32_t kRetryHintMs = 500;

absl::Status CheckCount(int count) {
  if (count <= kMaxTokenIds) return absl::OkStatus();
  return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                   absl::StrCat("expected at most ", kMaxTokenIds, " token ids, got ", count));
}

absl::Status Fill(const Tokenizer& tokenizer, const v1::GetVocabularyRequest&,
                  v1::Vocabulary* response) {
  response->set_size(tokenizer.vocabulary_size());
  response->set_add_bos(tokenizer.add_bos());
  response->set_add_eos(tokenizer.add_eos());
  for (const Tokenizer::SpecialToken& token : tokenizer.special_tokens()) {
    const auto piece = tokenizer.Piece(token.token_id);
    if (!piece.ok()) return piece.status();
    v1::SpecialToken* special = response->add_special_tokens();
    special->set_role(token.role);
    special->set_token_id(token.token_id);
    special->set_piece(*piece);
  }
  for (const int32_t id : tokenizer.end_of_generation_ids()) {
    response->add_end_of_generation_ids(id);
  }
  response->set_chat_template(tokenizer.chat_template());
  for (const auto& [name, text] : tokenizer.named_chat_templates()) {
    (*response->mutable_named_chat_templates())[name] = text;
  }
  return absl::OkStatus();
}

absl::Status Fill(const Tokenizer& tokenizer, const v1::TokenizeRequest& request,
                  v1::TokenizeResponse* response) {
  if (request.text().size() > kMaxTextBytes) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected at most ", kMaxTextBytes, " bytes of text, got ",
                                  request.text().size()));
  }
  const auto ids =
      tokenizer.Tokenize(request.text(), request.add_special(), request.parse_special());
  if (!ids.ok()) return ids.status();
  response->mutable_token_ids()->Add(ids->begin(), ids->end());
  return absl::OkStatus();
}

absl::Status Fill(const Tokenizer& tokenizer, const v1::DetokenizeRequest& request,
                  v1::DetokenizeResponse* response) {
  if (absl::Status status = CheckCount(request.token_ids_size()); !status.ok()) return status;
  const std::vector<int32_t> ids(request.token_ids().begin(), request.token_ids().end());
  auto text = tokenizer.Detokenize(ids, request.unparse_special());
  if (!text.ok()) return text.status();
  response->set_text(*std::move(text));
  return absl::OkStatus();
}

absl::Status Fill(const Tokenizer& tokenizer, const v1::GetPiecesRequest& request,
                  v1::GetPiecesResponse* response) {
  if (absl::Status status = CheckCount(request.token_ids_size()); !status.ok()) return status;
  for (const int32_t id : request.token_ids()) {
    auto piece = tokenizer.Piece(id);
    if (!piece.ok()) return piece.status();
    response->add_pieces(*std::move(piece));
  }
  return absl::OkStatus();
}

// Runs one call after another on a thread of its own.
class CallQueue {
 public:
  CallQueue() : thread_([this] { Loop(); }) {}

  // Finishes what waits.
  ~CallQueue() {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
    }
    thread_.join();
  }

  // Runs `call` later, unless it is refused with QUEUE_FULL. `bytes` is what it holds meanwhile.
  absl::Status Add(uint64_t bytes, std::function<void()> call) {
    absl::MutexLock lock(&mu_);
    if (calls_.size() >= kMaxWaitingCalls || bytes > kMaxWaitingBytes - waiting_bytes_) {
      return MakeError(
          v1::REASON_QUEUE_FULL,
          absl::StrCat("expected at most ", kMaxWaitingCalls, " calls of together ",
                       kMaxWaitingBytes, " bytes to wait for the tokenizer; try again later"),
          kRetryHintMs);
    }
    waiting_bytes_ += bytes;
    calls_.push_back({bytes, std::move(call)});
    return absl::OkStatus();
  }

 private:
  struct Call {
    uint64_t bytes;
    std::function<void()> run;
  };

  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || !calls_.empty(); }

  void Loop() {
    while (true) {
      Call call;
      {
        absl::MutexLock lock(&mu_);
        mu_.Await(absl::Condition(this, &CallQueue::HasNews));
        if (calls_.empty()) return;
        call = std::move(calls_.front());
        calls_.pop_front();
        waiting_bytes_ -= call.bytes;
      }
      call.run();
    }
  }

  absl::Mutex mu_;
  std::deque<Call> calls_ ABSL_GUARDED_BY(mu_);
  uint64_t waiting_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  // Last: it uses all of the above.
  std::thread thread_;
};

class Service final : public TokenizerService {
 public:
  explicit Service(const Worker* worker) : worker_(worker) {}

  std::shared_ptr<StreamHandler> Accept(const std::string& method, std::shared_ptr<Stream> stream,
                                        const PeerInfo& peer) override {
    if (method == "GetVocabulary") {
      return Handle<v1::GetVocabularyRequest, v1::Vocabulary>(std::move(stream), peer);
    }
    if (method == "Tokenize") {
      return Handle<v1::TokenizeRequest, v1::TokenizeResponse>(std::move(stream), peer);
    }
    if (method == "Detokenize") {
      return Handle<v1::DetokenizeRequest, v1::DetokenizeResponse>(std::move(stream), peer);
    }
    if (method == "GetPieces") {
      return Handle<v1::GetPiecesRequest, v1::GetPiecesResponse>(std::move(stream), peer);
    }
    return nullptr;
  }

 private:
  // The thread that reads carries every stream of the worker: it must not be busy with a long text.
  template <typename Request, typename Response>
  std::shared_ptr<StreamHandler> Handle(std::shared_ptr<Stream> stream, const PeerInfo& peer) {
    return HandleUnary<Request>(
        std::move(stream), peer,
        [this](std::shared_ptr<const Request> request, std::shared_ptr<UnaryCall> call) {
          const Tokenizer* tokenizer = worker_->tokenizer();
          if (tokenizer == nullptr) {
            return call->Refuse(MakeError(
                v1::REASON_NOT_READY, "the vocabulary is still loading; ask again", kRetryHintMs));
          }
          const absl::Status status = queue_.Add(request->ByteSizeLong(), [=] {
            if (call->is_abandoned()) return;
            Response response;
            const absl::Status filled = Fill(*tokenizer, *request, &response);
            filled.ok() ? call->Answer(response) : call->Refuse(filled);
          });
          if (!status.ok()) call->Refuse(status);
        });
  }

  const Worker* const worker_;
  CallQueue queue_;
};

}  // namespace

std::unique_ptr<TokenizerService> MakeTokenizerService(const Worker* worker) {
  return std::make_unique<Service>(worker);
}

}  // namespace meshnet::worker

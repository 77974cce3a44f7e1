#include "cc/worker/tokenizer_service.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"
#include "grpcpp/support/server_callback.h"

namespace meshnet::worker {
namespace {

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

class Service final : public v1::TokenizerService::CallbackService {
 public:
  explicit Service(const Worker* worker) : worker_(worker) {}

  grpc::ServerUnaryReactor* GetVocabulary(grpc::CallbackServerContext* context,
                                          const v1::GetVocabularyRequest* request,
                                          v1::Vocabulary* response) override {
    return Answer(context, *request, response);
  }
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override {
    return Answer(context, *request, response);
  }
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* context,
                                       const v1::DetokenizeRequest* request,
                                       v1::DetokenizeResponse* response) override {
    return Answer(context, *request, response);
  }
  grpc::ServerUnaryReactor* GetPieces(grpc::CallbackServerContext* context,
                                      const v1::GetPiecesRequest* request,
                                      v1::GetPiecesResponse* response) override {
    return Answer(context, *request, response);
  }

 private:
  template <typename Request, typename Response>
  grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context, const Request& request,
                                   Response* response) {
    grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
    const Tokenizer* tokenizer = worker_->tokenizer();
    const absl::Status status =
        tokenizer == nullptr
            ? MakeError(v1::REASON_NOT_READY, "the vocabulary is still loading; ask again", 500)
            : Fill(*tokenizer, request, response);
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }

  const Worker* const worker_;
};

}  // namespace

std::unique_ptr<v1::TokenizerService::CallbackService> MakeTokenizerService(const Worker* worker) {
  return std::make_unique<Service>(worker);
}

}  // namespace meshnet::worker

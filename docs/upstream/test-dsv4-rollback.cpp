// Cutting the tail of a DeepSeek V4 sequence after it was decoded token by token, twice: what
// follows must be what a context computes that never saw the removed tokens.
//
// In the style of upstream's tests: give it a DeepSeek V4 model.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama.h"

static const int n_prompt = 133;  // beyond a block of 128, which the removed tokens had begun
static const int n_draft = 6;

static void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

static void decode(llama_context* ctx, llama_token token, int pos) {
  llama_batch batch = llama_batch_init(1, 0, 1);
  batch.n_tokens = 1;
  batch.token[0] = token;
  batch.pos[0] = pos;
  batch.n_seq_id[0] = 1;
  batch.seq_id[0][0] = 0;
  batch.logits[0] = true;
  check(llama_decode(ctx, batch) == 0, "a token is decoded");
  llama_batch_free(batch);
}

// Logits behind the prompt and three more tokens; with `draft`, after six others were decoded and
// removed again, in two steps.
static std::vector<float> logits(llama_model* model, bool draft) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 256;
  params.n_threads = params.n_threads_batch = 1;
  params.n_rs_seq = n_draft;
  llama_context* ctx = llama_init_from_model(model, params);
  check(ctx != nullptr, "a context is made");
  for (int i = 0; i < n_prompt; i++) decode(ctx, 3 + i % 200, i);
  if (draft) {
    for (int i = 0; i < n_draft; i++) decode(ctx, 300 + i, n_prompt + i);
    llama_memory_t memory = llama_get_memory(ctx);
    check(llama_memory_seq_rm(memory, 0, n_prompt + 4, -1), "two tokens are removed");
    check(llama_memory_seq_rm(memory, 0, n_prompt, -1), "four more tokens are removed");
  }
  for (int i = 0; i < 3; i++) decode(ctx, 220 + i, n_prompt + i);
  const float* data = llama_get_logits_ith(ctx, -1);
  const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
  const std::vector<float> result(data, data + n_vocab);
  llama_free(ctx);
  return result;
}

int main(int argc, char** argv) {
  check(argc == 2, "usage: test-dsv4-rollback MODEL.gguf");
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  check(model != nullptr, "the model is loaded");
  const std::vector<float> expected = logits(model, false);
  const std::vector<float> found = logits(model, true);
  double worst = 0;
  for (size_t i = 0; i < found.size(); i++)
    worst = std::fmax(worst, std::fabs(double(found[i]) - expected[i]));
  printf("largest difference: %g\n", worst);
  check(worst == 0, "removed tokens leave nothing behind");
  llama_model_free(model);
  llama_backend_free();
  return 0;
}

// A DeepSeek V4 without a layer that has a lightning indexer: its indexer's cache has no layers,
// and evaluating it must not divide by zero.
//
// In the style of upstream's tests: give it such a model.
#include <cstdio>
#include <cstdlib>

#include "llama.h"

static void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

int main(int argc, char** argv) {
  check(argc == 2, "usage: test-empty-indexer-cache MODEL.gguf");
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  check(model != nullptr, "the model is loaded");
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 64;
  params.n_threads = params.n_threads_batch = 1;
  llama_context* ctx = llama_init_from_model(model, params);
  check(ctx != nullptr, "a context is made");
  llama_token tokens[] = {3, 4, 5, 6};
  check(llama_decode(ctx, llama_batch_get_one(tokens, 4)) == 0, "a batch is decoded");
  check(llama_get_logits_ith(ctx, -1) != nullptr, "there are logits");
  llama_free(ctx);
  llama_model_free(model);
  llama_backend_free();
  return 0;
}

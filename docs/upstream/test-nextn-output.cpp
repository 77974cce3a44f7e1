// llama_set_embeddings_nextn() on a context whose graphs are reserved: the rows must be those of a
// context that reserves again after it.
//
// In the style of upstream's tests: give it a model whose graph has the nextn output only when it
// is asked for (DeepSeek V4, MiMo2).
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama-ext.h"
#include "llama.h"

static const int n_tokens = 8;

static void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

// The rows of a batch; with `reserve` the graphs are reserved between switching and decoding, which
// is what set_embeddings_nextn() should cause by itself.
static std::vector<float> rows(llama_model* model, bool masked, bool reserve) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = 64;
  params.n_batch = params.n_ubatch = 32;
  params.n_threads = params.n_threads_batch = 1;
  llama_context* ctx = llama_init_from_model(model, params);
  check(ctx != nullptr, "a context is made");

  llama_set_embeddings_nextn(ctx, true, masked);
  if (reserve) {
    // any setting with a reservation of its own, there and back
    llama_set_causal_attn(ctx, false);
    llama_set_causal_attn(ctx, true);
  }
  llama_batch batch = llama_batch_init(n_tokens, 0, 1);
  batch.n_tokens = n_tokens;
  for (int i = 0; i < n_tokens; i++) {
    batch.token[i] = 3 + i;
    batch.pos[i] = i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = 1;
  }
  check(llama_decode(ctx, batch) == 0, "the batch is decoded");
  llama_synchronize(ctx);
  const float* data = llama_get_embeddings_nextn(ctx);
  check(data != nullptr, "there are nextn rows");
  const std::vector<float> result(data, data + size_t(n_tokens) * llama_model_n_embd_out(model));
  llama_batch_free(batch);
  llama_free(ctx);
  return result;
}

int main(int argc, char** argv) {
  check(argc == 2, "usage: test-nextn-output MODEL.gguf");
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  check(model != nullptr, "the model is loaded");
  bool equal = true;
  for (const bool masked : {false, true}) {
    const std::vector<float> expected = rows(model, masked, true);
    const std::vector<float> found = rows(model, masked, false);
    double worst = 0;
    for (size_t i = 0; i < found.size(); i++)
      worst = std::fmax(worst, std::fabs(double(found[i]) - expected[i]));
    printf("%s rows, largest difference: %g\n", masked ? "masked" : "all", worst);
    equal = equal && worst == 0;
  }
  check(equal, "rows do not depend on when they were switched on");
  llama_model_free(model);
  llama_backend_free();
  return 0;
}

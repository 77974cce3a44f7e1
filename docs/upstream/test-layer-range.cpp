// Two layer ranges, one after the other, against the whole model: the same logits, each range with
// its own tensors only, and no result where there can be none.
//
// In the style of upstream's tests: give it a model of an architecture with layer ranges.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "llama-ext.h"
#include "llama.h"

static const int n_tokens = 12;

static void check(bool ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

struct stage {
  llama_model* model;
  llama_context* ctx;

  stage(const char* path, int begin, int end) {
    llama_model_params params = llama_model_default_params();
    params.layer_begin = begin;
    params.layer_end = end;
    model = llama_model_load_from_file(path, params);
    check(model != nullptr, "a range is loaded");
    llama_context_params cparams = llama_context_default_params();
    cparams.n_ctx = 64;
    cparams.n_threads = cparams.n_threads_batch = 1;
    ctx = llama_init_from_model(model, cparams);
    check(ctx != nullptr, "a context is made");
  }
  ~stage() {
    llama_free(ctx);
    llama_model_free(model);
  }

  int32_t decode(const std::vector<float>* boundary) {
    llama_batch batch = llama_batch_init(n_tokens, 0, 1);
    batch.n_tokens = n_tokens;
    if (boundary) batch.embd = const_cast<float*>(boundary->data());
    for (int i = 0; i < n_tokens; i++) {
      batch.token[i] = 3 + 7 * i;
      batch.pos[i] = i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = 0;
      batch.logits[i] = i + 1 == n_tokens;
    }
    const int32_t result = llama_decode(ctx, batch);
    batch.embd = nullptr;
    llama_batch_free(batch);
    return result;
  }

  std::vector<float> logits() const {
    const float* data = llama_get_logits_ith(ctx, n_tokens - 1);
    check(data != nullptr, "there are logits");
    return std::vector<float>(data, data + llama_vocab_n_tokens(llama_model_get_vocab(model)));
  }
};

int main(int argc, char** argv) {
  check(argc == 2, "usage: test-layer-range MODEL.gguf");
  llama_backend_init();
  stage whole(argv[1], 0, -1);
  check(whole.decode(nullptr) == 0, "the whole model decodes");
  const uint64_t whole_size = llama_model_loaded_size(whole.model);
  const int n_layer = llama_model_n_layer(whole.model);
  const std::vector<float> expected = whole.logits();
  for (int cut = 1; cut < n_layer; cut++) {
    stage head(argv[1], 0, cut), tail(argv[1], cut, -1);
    check(llama_model_loaded_size(head.model) < whole_size, "a head is smaller than the whole");
    check(llama_model_loaded_size(tail.model) < whole_size, "a tail is smaller than the whole");
    check(tail.decode(nullptr) != 0, "a tail without a boundary is refused");
    check(head.decode(nullptr) == 0, "a head decodes");
    const float* rows = llama_get_boundary(head.ctx);
    check(rows != nullptr, "a head has a boundary");
    const size_t width = llama_model_boundary_n_embd_out(head.model);
    check(width == size_t(llama_model_boundary_n_embd_in(tail.model)),
          "both sides of a cut are as wide");
    const std::vector<float> boundary(rows, rows + n_tokens * width);
    check(tail.decode(&boundary) == 0, "a tail decodes");
    check(tail.logits() == expected, "two ranges give the logits of the whole model");
  }
  llama_model_params params = llama_model_default_params();
  params.layer_begin = params.layer_end = n_layer;
  check(llama_model_load_from_file(argv[1], params) == nullptr, "an empty range is refused");
  llama_backend_free();
  return 0;
}

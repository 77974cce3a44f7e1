#ifndef CC_SHARD_ENGINE_LLAMA_TESTING_CONTRACT_OPTIONS_H_
#define CC_SHARD_ENGINE_LLAMA_TESTING_CONTRACT_OPTIONS_H_

#include <string>

#include "cc/shard_engine/contract_test_suite.h"
#include "cc/shard_engine/llama/llama_engine.h"

namespace meshnet {

// What the contract test suite asks for, as options of the llama engine on the GGUF `model_path`.
inline LlamaEngineOptions ContractOptions(const ContractConfig& config,
                                          const std::string& model_path) {
  LlamaEngineOptions options;
  options.model_path = model_path;
  options.range = config.range;
  options.batch_policy = config.batch_policy;
  options.max_sessions = config.max_sessions;
  options.context_tokens = config.context_tokens;
  options.max_step_tokens = config.max_step_tokens;
  options.max_logit_rows = config.max_step_tokens;
  options.idle_ttl = config.idle_ttl;
  options.lru_min_idle = config.lru_min_idle;
  options.now = config.now;
  options.before_batch = config.before_batch;
  // ggml's threads wait for each other by spinning: more of them than idle cores makes tests crawl.
  options.threads = 1;
  options.poll = 0;
  return options;
}

}  // namespace meshnet

#endif  // CC_SHARD_ENGINE_LLAMA_TESTING_CONTRACT_OPTIONS_H_

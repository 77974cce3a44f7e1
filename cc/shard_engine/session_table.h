// Which session holds which slot, how many tokens it has cached, and when it may be evicted.
//
// The bookkeeping half of an engine: it decides about slots, epochs, idle time and the memory
// budget and knows nothing of how an engine stores a session's state. Engines index their own
// per-slot state by Session::slot and clear a slot in `on_free`.
//
//   SessionTable table(options);
//   table.Open(key, {}, &evicted);
//   auto session = table.Use(key);          // engine thread
//   table.SetCached(*session, 42);
//   table.Cancel(key);                      // any thread
//
// Open, Use, SetCached, Release and EvictIdle belong to the engine thread; Cancel and the const
// members may be called from any thread.
#ifndef MESHNET_CC_SHARD_ENGINE_SESSION_TABLE_H_
#define MESHNET_CC_SHARD_ENGINE_SESSION_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "cc/shard_engine/shard_engine.h"

namespace meshnet {

class SessionTable {
 public:
  struct Options {
    uint32_t slots = 1;
    // A session without a step for this long may be evicted by EvictIdle. SessionOptions can only
    // shorten it. Infinite = never.
    absl::Duration idle_ttl = absl::InfiniteDuration();
    // A session that was active more recently than this is never evicted for another one.
    absl::Duration lru_min_idle = absl::Seconds(10);
    // What a session's state takes that holds so many tokens; null = nothing.
    std::function<uint64_t(uint32_t tokens)> bytes = nullptr;
    // What the states of all sessions may take. 0 = no bound.
    uint64_t budget_bytes = 0;
    // Session ids whose newest epoch is remembered after they are gone.
    size_t remembered_ids = 4096;
    std::function<absl::Time()> now = absl::Now;
    // Called with the slot of every session that leaves, before the slot can be taken again. Must
    // not call back into the table.
    std::function<void(uint32_t slot)> on_free = nullptr;
  };

  // Valid until the session leaves the table.
  struct Session {
    SessionKey key;
    uint32_t slot = 0;
    uint32_t cached_tokens = 0;
    absl::Duration ttl;
    absl::Time last_used;
    // Set by the engine while a batch with a step of this session runs: never evicted then.
    bool pinned = false;
    std::atomic<bool> cancelled{false};
  };

  explicit SessionTable(Options options);

  // The contract of ShardEngine::OpenSession. FIELD_OUT_OF_BOUNDS for an id that is not 16 bytes or
  // an epoch of 0.
  absl::StatusOr<Session*> Open(const SessionKey& key, const SessionOptions& options,
                                std::vector<SessionKey>* evicted);

  // The session, marked as used now. SESSION_UNKNOWN, SESSION_EVICTED or STALE_EPOCH.
  absl::StatusOr<Session*> Use(const SessionKey& key);

  // Records what `session` holds. When that grows past the budget, sessions idle for lru_min_idle
  // are evicted, least recently used first (EvictIdle reports them); MEMORY_BUDGET_EXCEEDED when
  // that is not enough, and nothing is recorded then.
  absl::Status SetCached(Session* session, uint32_t tokens);

  // SESSION_UNKNOWN, SESSION_EVICTED or STALE_EPOCH when it is not held.
  absl::Status Release(const SessionKey& key);

  // Evicts what has passed its TTL; returns those and the ones that SetCached evicted before.
  std::vector<SessionKey> EvictIdle();

  void Cancel(const SessionKey& key);

  uint32_t open_sessions() const;
  uint64_t held_bytes() const;
  uint64_t evictions() const;

 private:
  using SessionMap = std::map<SessionKey, std::unique_ptr<Session>>;

  // The newest epoch of an id that was ever held, and how that epoch ended.
  struct Memory {
    uint64_t epoch = 0;
    bool evicted = false;
    std::list<std::string>::iterator order;
  };

  absl::Status Missing(const SessionKey& key) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Remember(const SessionKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Drop(SessionMap::iterator it, bool evicted) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The least recently used session that may give way now, or end(). Never `keep`.
  SessionMap::iterator Victim(const Session* keep) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t BytesOf(uint32_t tokens) const;

  const Options options_;
  mutable absl::Mutex mu_;
  SessionMap sessions_ ABSL_GUARDED_BY(mu_);
  std::vector<uint32_t> free_slots_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Memory> memory_ ABSL_GUARDED_BY(mu_);
  // Least recently opened first.
  std::list<std::string> memory_order_ ABSL_GUARDED_BY(mu_);
  std::vector<SessionKey> unreported_ ABSL_GUARDED_BY(mu_);
  uint64_t held_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t evictions_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace meshnet

#endif  // MESHNET_CC_SHARD_ENGINE_SESSION_TABLE_H_

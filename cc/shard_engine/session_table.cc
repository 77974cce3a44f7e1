#include "cc/shard_engine/session_table.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/common/status.h"

namespace meshnet {
namespace {

constexpr size_t kSessionIdBytes = 16;
constexpr uint32_t kRetryAfterMs = 1000;

}  // namespace

SessionTable::SessionTable(Options options) : options_(std::move(options)) {
  // Lowest slot first.
  for (uint32_t slot = options_.slots; slot > 0; --slot) free_slots_.push_back(slot - 1);
}

absl::StatusOr<SessionTable::Session*> SessionTable::Open(const SessionKey& key,
                                                          const SessionOptions& options,
                                                          std::vector<SessionKey>* evicted) {
  if (key.route_session_id.size() != kSessionIdBytes || key.route_epoch == 0) {
    return MakeError(v1::REASON_FIELD_OUT_OF_BOUNDS,
                     absl::StrCat("expected a route session id of ", kSessionIdBytes,
                                  " bytes and an epoch >= 1, got ", key.route_session_id.size(),
                                  " bytes and epoch ", key.route_epoch));
  }
  absl::MutexLock lock(&mu_);
  if (sessions_.count(key) > 0) {
    return MakeError(v1::REASON_SESSION_EXISTS,
                     absl::StrCat("this session is already open at epoch ", key.route_epoch,
                                  "; release it or open it with a newer epoch"));
  }
  if (const auto known = memory_.find(key.route_session_id);
      known != memory_.end() && known->second.epoch > key.route_epoch) {
    return Missing(key);
  }
  // Older epochs of the id: their route is gone.
  auto older = sessions_.lower_bound(SessionKey{key.route_session_id, 0});
  while (older != sessions_.end() && older->first.route_session_id == key.route_session_id) {
    const auto next = std::next(older);
    if (evicted != nullptr) evicted->push_back(older->first);
    Drop(older, /*evicted=*/false);
    older = next;
  }
  if (free_slots_.empty()) {
    const auto victim = Victim(nullptr);
    if (victim == sessions_.end()) {
      return MakeError(v1::REASON_SESSIONS_EXHAUSTED,
                       absl::StrCat("all ", options_.slots,
                                    " session slots are in use and none has been idle for ",
                                    absl::FormatDuration(options_.lru_min_idle), "; retry later"),
                       kRetryAfterMs);
    }
    if (evicted != nullptr) evicted->push_back(victim->first);
    Drop(victim, /*evicted=*/true);
  }
  auto session = std::make_unique<Session>();
  session->key = key;
  session->slot = free_slots_.back();
  session->ttl = options.idle_ttl > absl::ZeroDuration()
                     ? std::min(options.idle_ttl, options_.idle_ttl)
                     : options_.idle_ttl;
  session->last_used = options_.now();
  free_slots_.pop_back();
  Remember(key);
  Session* raw = session.get();
  sessions_.emplace(key, std::move(session));
  return raw;
}

absl::StatusOr<SessionTable::Session*> SessionTable::Use(const SessionKey& key) {
  absl::MutexLock lock(&mu_);
  const auto it = sessions_.find(key);
  if (it == sessions_.end()) return Missing(key);
  it->second->last_used = options_.now();
  return it->second.get();
}

absl::Status SessionTable::SetCached(Session* session, uint32_t tokens) {
  absl::MutexLock lock(&mu_);
  const bool bounded = options_.budget_bytes > 0 && tokens > session->cached_tokens;
  const uint64_t before = BytesOf(session->cached_tokens);
  const uint64_t after = BytesOf(tokens);
  while (bounded && held_bytes_ - before + after > options_.budget_bytes) {
    const auto victim = Victim(session);
    if (victim == sessions_.end()) {
      return MakeError(v1::REASON_MEMORY_BUDGET_EXCEEDED,
                       absl::StrCat("the session needs ", after, " bytes for ", tokens,
                                    " cached tokens; all sessions together hold ", held_bytes_,
                                    " and the budget is ", options_.budget_bytes, "; retry later"),
                       kRetryAfterMs);
    }
    unreported_.push_back(victim->first);
    Drop(victim, /*evicted=*/true);
  }
  held_bytes_ += after;
  held_bytes_ -= before;
  session->cached_tokens = tokens;
  return absl::OkStatus();
}

absl::Status SessionTable::Release(const SessionKey& key) {
  absl::MutexLock lock(&mu_);
  const auto it = sessions_.find(key);
  if (it == sessions_.end()) return Missing(key);
  Drop(it, /*evicted=*/false);
  return absl::OkStatus();
}

std::vector<SessionKey> SessionTable::EvictIdle() {
  absl::MutexLock lock(&mu_);
  std::vector<SessionKey> evicted = std::move(unreported_);
  unreported_.clear();
  const absl::Time now = options_.now();
  for (auto it = sessions_.begin(); it != sessions_.end();) {
    const auto next = std::next(it);
    if (!it->second->pinned && now - it->second->last_used > it->second->ttl) {
      evicted.push_back(it->first);
      Drop(it, /*evicted=*/true);
    }
    it = next;
  }
  return evicted;
}

void SessionTable::Cancel(const SessionKey& key) {
  absl::MutexLock lock(&mu_);
  if (const auto it = sessions_.find(key); it != sessions_.end()) it->second->cancelled = true;
}

uint32_t SessionTable::open_sessions() const {
  absl::MutexLock lock(&mu_);
  return static_cast<uint32_t>(sessions_.size());
}

uint64_t SessionTable::held_bytes() const {
  absl::MutexLock lock(&mu_);
  return held_bytes_;
}

uint64_t SessionTable::evictions() const {
  absl::MutexLock lock(&mu_);
  return evictions_;
}

absl::Status SessionTable::Missing(const SessionKey& key) const {
  const auto known = memory_.find(key.route_session_id);
  if (known != memory_.end() && known->second.epoch > key.route_epoch) {
    return MakeError(
        v1::REASON_STALE_EPOCH,
        absl::StrCat("expected epoch >= ", known->second.epoch, " for this session, got ",
                     key.route_epoch, "; open a new session with a newer epoch"));
  }
  if (known != memory_.end() && known->second.epoch == key.route_epoch && known->second.evicted) {
    return MakeError(v1::REASON_SESSION_EVICTED,
                     "the session's cache was evicted; open it again and prefill from position 0");
  }
  return MakeError(v1::REASON_SESSION_UNKNOWN,
                   absl::StrCat("no session with this id at epoch ", key.route_epoch,
                                "; open it and prefill from position 0"));
}

void SessionTable::Remember(const SessionKey& key) {
  const auto known = memory_.find(key.route_session_id);
  if (known != memory_.end()) {
    known->second.epoch = key.route_epoch;
    known->second.evicted = false;
    memory_order_.splice(memory_order_.end(), memory_order_, known->second.order);
    return;
  }
  memory_order_.push_back(key.route_session_id);
  memory_[key.route_session_id] = {key.route_epoch, false, std::prev(memory_order_.end())};
  // An id that is still open is never forgotten: the bound holds for those that are gone.
  const size_t bound = options_.remembered_ids + options_.slots;
  for (auto oldest = memory_order_.begin();
       memory_.size() > bound && oldest != memory_order_.end();) {
    const auto held = sessions_.lower_bound(SessionKey{*oldest, 0});
    const bool open = (held != sessions_.end() && held->first.route_session_id == *oldest) ||
                      *oldest == key.route_session_id;
    if (open) {
      ++oldest;
      continue;
    }
    memory_.erase(*oldest);
    oldest = memory_order_.erase(oldest);
  }
}

void SessionTable::Drop(SessionMap::iterator it, bool evicted) {
  const uint32_t slot = it->second->slot;
  held_bytes_ -= BytesOf(it->second->cached_tokens);
  if (evicted) {
    ++evictions_;
    if (const auto known = memory_.find(it->first.route_session_id);
        known != memory_.end() && known->second.epoch == it->first.route_epoch) {
      known->second.evicted = true;
    }
  }
  sessions_.erase(it);
  if (options_.on_free) options_.on_free(slot);
  // Lowest free slot on top: placement depends only on what is open.
  free_slots_.insert(
      std::upper_bound(free_slots_.begin(), free_slots_.end(), slot, std::greater<uint32_t>()),
      slot);
}

uint64_t SessionTable::BytesOf(uint32_t tokens) const {
  return options_.bytes ? options_.bytes(tokens) : 0;
}

SessionTable::SessionMap::iterator SessionTable::Victim(const Session* keep) {
  const absl::Time now = options_.now();
  auto victim = sessions_.end();
  for (auto it = sessions_.begin(); it != sessions_.end(); ++it) {
    const Session& session = *it->second;
    if (&session == keep || session.pinned) continue;
    if (now - session.last_used < std::min(options_.lru_min_idle, session.ttl)) continue;
    if (victim == sessions_.end() || session.last_used < victim->second->last_used) victim = it;
  }
  return victim;
}

}  // namespace meshnet

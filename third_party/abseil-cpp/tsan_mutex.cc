// Tells the thread sanitizer what absl::Mutex does.
//
// The sysroot's Abseil is not compiled for the sanitizer, which therefore sees none of its mutexes
// and would take all that they protect for races. The linker (--wrap, see BUILD.bazel) sends every
// call from outside Abseil's own mutex.o, gRPC's included, through the functions here, which put
// the sanitizer's annotations around it.

#include <sanitizer/tsan_interface.h>

#include "absl/synchronization/mutex.h"

#define REAL(symbol) __real_##symbol
#define WRAP(symbol) __wrap_##symbol

namespace {

void BeforeWait(void* mutex) {
  __tsan_mutex_pre_unlock(mutex, 0);
  __tsan_mutex_post_unlock(mutex, 0);
  __tsan_mutex_pre_lock(mutex, 0);
}

void AfterWait(void* mutex) { __tsan_mutex_post_lock(mutex, 0, 0); }

}  // namespace

extern "C" {

// The sanitizer sees only the memory functions that uninstrumented libraries call, and none of
// their synchronisation. A stack holds the frames of instrumented functions and the one that called
// a memory function; so these are about accesses that Abseil and gRPC themselves make (gRPC's
// HTTP/2 transport: embiggen, tcp, on_writable, fd_orphan), and not about what runs in their
// callbacks. CallOpSet is gRPC's, in a header: it marks an operation as done while its starter may
// still be at it.
const char* __tsan_default_suppressions() {
  return "race:^absl::\n"
         "race:^grpc_\n"
         "race:^gpr_\n"
         "race:^do_embiggen\n"
         "race:^tcp_\n"
         "race:^on_writable\n"
         "race:^fd_orphan\n"
         "race:^grpc::internal::CallOpSet<\n";
}

#define WRAP_LOCK(symbol, flags)             \
  void REAL(symbol)(void*);                  \
  void WRAP(symbol)(void* mutex) {           \
    __tsan_mutex_pre_lock(mutex, flags);     \
    REAL(symbol)(mutex);                     \
    __tsan_mutex_post_lock(mutex, flags, 0); \
  }
WRAP_LOCK(_ZN4absl7debian35Mutex4LockEv, 0)
WRAP_LOCK(_ZN4absl7debian35Mutex10ReaderLockEv, __tsan_mutex_read_lock)

#define WRAP_UNLOCK(symbol, flags)          \
  void REAL(symbol)(void*);                 \
  void WRAP(symbol)(void* mutex) {          \
    __tsan_mutex_pre_unlock(mutex, flags);  \
    REAL(symbol)(mutex);                    \
    __tsan_mutex_post_unlock(mutex, flags); \
  }
WRAP_UNLOCK(_ZN4absl7debian35Mutex6UnlockEv, 0)
WRAP_UNLOCK(_ZN4absl7debian35Mutex12ReaderUnlockEv, __tsan_mutex_read_lock)

#define WRAP_TRY_LOCK(symbol, flags)                                                          \
  bool REAL(symbol)(void*);                                                                   \
  bool WRAP(symbol)(void* mutex) {                                                            \
    __tsan_mutex_pre_lock(mutex, (flags) | __tsan_mutex_try_lock);                            \
    const bool locked = REAL(symbol)(mutex);                                                  \
    __tsan_mutex_post_lock(                                                                   \
        mutex, (flags) | (locked ? __tsan_mutex_try_lock : __tsan_mutex_try_lock_failed), 0); \
    return locked;                                                                            \
  }
WRAP_TRY_LOCK(_ZN4absl7debian35Mutex7TryLockEv, 0)
WRAP_TRY_LOCK(_ZN4absl7debian35Mutex13ReaderTryLockEv, __tsan_mutex_read_lock)

// Waiting, with the mutex held before and after.
void REAL(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE)(void*, const absl::Condition&);
void WRAP(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE)(void* mutex,
                                                          const absl::Condition& condition) {
  BeforeWait(mutex);
  REAL(_ZN4absl7debian35Mutex5AwaitERKNS0_9ConditionE)(mutex, condition);
  AfterWait(mutex);
}

bool REAL(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
    void*, const absl::Condition&, absl::Duration);
bool WRAP(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
    void* mutex, const absl::Condition& condition, absl::Duration timeout) {
  BeforeWait(mutex);
  const bool met = REAL(_ZN4absl7debian35Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
      mutex, condition, timeout);
  AfterWait(mutex);
  return met;
}

bool REAL(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
    void*, const absl::Condition&, absl::Time);
bool WRAP(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
    void* mutex, const absl::Condition& condition, absl::Time deadline) {
  BeforeWait(mutex);
  const bool met = REAL(_ZN4absl7debian35Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
      mutex, condition, deadline);
  AfterWait(mutex);
  return met;
}

void REAL(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE)(void*, void*);
void WRAP(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE)(void* variable, void* mutex) {
  BeforeWait(mutex);
  REAL(_ZN4absl7debian37CondVar4WaitEPNS0_5MutexE)(variable, mutex);
  AfterWait(mutex);
}

bool REAL(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE)(void*, void*,
                                                                                absl::Duration);
bool WRAP(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE)(
    void* variable, void* mutex, absl::Duration timeout) {
  BeforeWait(mutex);
  const bool late = REAL(_ZN4absl7debian37CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE)(
      variable, mutex, timeout);
  AfterWait(mutex);
  return late;
}

bool REAL(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE)(void*, void*,
                                                                             absl::Time);
bool WRAP(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE)(void* variable,
                                                                             void* mutex,
                                                                             absl::Time deadline) {
  BeforeWait(mutex);
  const bool late = REAL(_ZN4absl7debian37CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE)(
      variable, mutex, deadline);
  AfterWait(mutex);
  return late;
}

// Taking the mutex once a condition holds.
void REAL(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)(void*, const absl::Condition&);
void WRAP(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)(void* mutex,
                                                             const absl::Condition& condition) {
  __tsan_mutex_pre_lock(mutex, 0);
  REAL(_ZN4absl7debian35Mutex8LockWhenERKNS0_9ConditionE)(mutex, condition);
  __tsan_mutex_post_lock(mutex, 0, 0);
}

bool REAL(_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
    void*, const absl::Condition&, absl::Duration);
bool WRAP(_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
    void* mutex, const absl::Condition& condition, absl::Duration timeout) {
  __tsan_mutex_pre_lock(mutex, 0);
  const bool met =
      REAL(_ZN4absl7debian35Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE)(
          mutex, condition, timeout);
  __tsan_mutex_post_lock(mutex, 0, 0);
  return met;
}

bool REAL(_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
    void*, const absl::Condition&, absl::Time);
bool WRAP(_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
    void* mutex, const absl::Condition& condition, absl::Time deadline) {
  __tsan_mutex_pre_lock(mutex, 0);
  const bool met = REAL(_ZN4absl7debian35Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE)(
      mutex, condition, deadline);
  __tsan_mutex_post_lock(mutex, 0, 0);
  return met;
}

// Gives its mutex, whose address is its only member, back early.
void REAL(_ZN4absl7debian319ReleasableMutexLock7ReleaseEv)(void**);
void WRAP(_ZN4absl7debian319ReleasableMutexLock7ReleaseEv)(void** lock) {
  void* const mutex = *lock;
  __tsan_mutex_pre_unlock(mutex, 0);
  REAL(_ZN4absl7debian319ReleasableMutexLock7ReleaseEv)(lock);
  __tsan_mutex_post_unlock(mutex, 0);
}

// A new mutex may lie where an old one was.
void REAL(_ZN4absl7debian35MutexD1Ev)(void*);
void WRAP(_ZN4absl7debian35MutexD1Ev)(void* mutex) {
  REAL(_ZN4absl7debian35MutexD1Ev)(mutex);
  __tsan_mutex_destroy(mutex, __tsan_mutex_linker_init);
}

}  // extern "C"

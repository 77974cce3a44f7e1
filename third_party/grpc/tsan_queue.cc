// Tells the thread sanitizer in which order gRPC runs callbacks.
//
// The sysroot's gRPC is not compiled for the sanitizer, which therefore does not see that what
// comes out of a completion queue comes after the operation was started and after its data was
// there, nor that what the executor or a transport runs later comes after it was given to them. The
// linker (--wrap, see BUILD.bazel) sends both through the functions here.

#include <sanitizer/tsan_interface.h>

#include "absl/status/status.h"
#include "grpc/grpc.h"

struct grpc_cq_completion;

// As gRPC 1.51 has it.
struct grpc_closure {
  void* next;
  void (*callback)(void* argument, absl::Status error);
  void* argument;
  void* error;
};

namespace {

// What a closure was before it was given away.
struct Given {
  grpc_closure* closure;
  void (*callback)(void* argument, absl::Status error);
  void* argument;
};

void RunGiven(void* argument, absl::Status error) {
  auto* const held = static_cast<Given*>(argument);
  __tsan_acquire(held);
  const Given given = *held;
  delete held;
  // It may be given again, or be gone, before the callback returns.
  given.closure->callback = given.callback;
  given.closure->argument = given.argument;
  given.callback(given.argument, static_cast<absl::Status&&>(error));
}

void Give(grpc_closure* closure) {
  auto* const given = new Given{closure, closure->callback, closure->argument};
  closure->callback = RunGiven;
  closure->argument = given;
  __tsan_release(given);
}

}  // namespace

extern "C" {

// grpc_core::Executor::Run
#define EXECUTOR_RUN(prefix) \
  prefix##_ZN9grpc_core8Executor3RunEP12grpc_closureN4absl7debian36StatusENS_12ExecutorTypeENS_15ExecutorJobTypeE
void EXECUTOR_RUN(__real_)(grpc_closure* closure, absl::Status error, int executor, int job);
void EXECUTOR_RUN(__wrap_)(grpc_closure* closure, absl::Status error, int executor, int job) {
  Give(closure);
  EXECUTOR_RUN(__real_)(closure, static_cast<absl::Status&&>(error), executor, job);
}

// grpc_core::Combiner::Run, in whose order a transport does its work.
#define COMBINER_RUN(prefix) \
  prefix##_ZN9grpc_core8Combiner3RunEP12grpc_closureN4absl7debian36StatusE
void COMBINER_RUN(__real_)(void* combiner, grpc_closure* closure, absl::Status error);
void COMBINER_RUN(__wrap_)(void* combiner, grpc_closure* closure, absl::Status error) {
  Give(closure);
  COMBINER_RUN(__real_)(combiner, closure, static_cast<absl::Status&&>(error));
}

// Operations of completion queues; the tag names them all the way.

grpc_call_error __real_grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t count,
                                             void* tag, void* reserved);
grpc_call_error __wrap_grpc_call_start_batch(grpc_call* call, const grpc_op* ops, size_t count,
                                             void* tag, void* reserved) {
  __tsan_release(tag);
  return __real_grpc_call_start_batch(call, ops, count, tag, reserved);
}

// grpc_cq_end_op: the operation is done.
#define END_OP(prefix) \
  prefix##_Z14grpc_cq_end_opP21grpc_completion_queuePvN4absl7debian36StatusEPFvS1_P18grpc_cq_completionES1_S6_b
void END_OP(__real_)(grpc_completion_queue* queue, void* tag, absl::Status error,
                     void (*done)(void* done_arg, grpc_cq_completion* storage), void* done_arg,
                     grpc_cq_completion* storage, bool internal);
void END_OP(__wrap_)(grpc_completion_queue* queue, void* tag, absl::Status error,
                     void (*done)(void* done_arg, grpc_cq_completion* storage), void* done_arg,
                     grpc_cq_completion* storage, bool internal) {
  __tsan_release(tag);
  END_OP(__real_)(queue, tag, static_cast<absl::Status&&>(error), done, done_arg, storage,
                  internal);
}

grpc_event __real_grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                             void* reserved);
grpc_event __wrap_grpc_completion_queue_next(grpc_completion_queue* queue, gpr_timespec deadline,
                                             void* reserved) {
  const grpc_event event = __real_grpc_completion_queue_next(queue, deadline, reserved);
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

grpc_event __real_grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                              gpr_timespec deadline, void* reserved);
grpc_event __wrap_grpc_completion_queue_pluck(grpc_completion_queue* queue, void* tag,
                                              gpr_timespec deadline, void* reserved) {
  const grpc_event event = __real_grpc_completion_queue_pluck(queue, tag, deadline, reserved);
  if (event.type == GRPC_OP_COMPLETE) __tsan_acquire(event.tag);
  return event;
}

}  // extern "C"

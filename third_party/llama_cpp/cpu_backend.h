// ggml's CPU backend for the running CPU.
//
// The program holds several builds of the backend (cpu_variants.bzl); this picks the best one that
// the CPU can run, or the one that is asked for, and registers it. Call RegisterCpuBackend() once,
// before anything else of ggml or llama: llama_backend_init() would otherwise look for backends in
// files.
//
//   absl::StatusOr<std::string> variant = meshnet::llama_cpp::RegisterCpuBackend("");
//
// Variants give slightly different numbers, so the name of the one that runs belongs to whatever
// must be equal between processes whose numbers are compared.

#ifndef THIRD_PARTY_LLAMA_CPP_CPU_BACKEND_H_
#define THIRD_PARTY_LLAMA_CPP_CPU_BACKEND_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace meshnet::llama_cpp {

// Instruction sets beyond the baseline that variants are compiled for. True means that the CPU has
// them and the operating system saves their registers.
struct InstructionSets {
  // Of x86-64, beyond x86-64-v2. What comes after x86_64_v3 is only looked for where that is there.
  bool x86_64_v3 = false;  // AVX, AVX2, BMI1, BMI2, F16C, FMA, LZCNT, MOVBE
  bool avx_vnni = false;
  bool avx512 = false;  // F, CD, VL, DQ and BW
  bool avx512_vbmi = false;
  bool avx512_vnni = false;
  bool avx512_bf16 = false;
  bool amx_int8 =
      false;  // with the tiles; on Linux the process has asked for permission to use them

  // Of aarch64, beyond Armv8.0.
  bool armv8_2_dotprod = false;  // Armv8.2 with half precision and dot products
  bool i8mm = false;             // products of 8-bit matrices
};

// What the running CPU can do.
InstructionSets HostInstructionSets();

// Names of all variants, from the plainest to the best.
std::vector<std::string> CpuVariants();

// The variant to use on a CPU that can do `host`: `forced`, or the best one if it is empty.
// INVALID_ARGUMENT for a name that is none, FAILED_PRECONDITION for one that the CPU cannot run.
absl::StatusOr<std::string> ChooseCpuVariant(const InstructionSets& host, absl::string_view forced);

// Chooses for the running CPU and registers the backend with ggml; returns the variant's name.
// Thread-safe. A further call is fine if it leads to the same variant, and FAILED_PRECONDITION
// otherwise: a process runs one of them.
absl::StatusOr<std::string> RegisterCpuBackend(absl::string_view forced);

}  // namespace meshnet::llama_cpp

#endif  // THIRD_PARTY_LLAMA_CPP_CPU_BACKEND_H_

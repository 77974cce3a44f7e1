// Malformed frames from a seeded generator, each with the reason for which it must be refused.
//
//   Rng rng(1);
//   for (const auto& [name, make] : FrameAttacks()) {
//     const Attack attack = make(&rng);
//     // Send attack.messages to a receiver that expects AttackedSeam().
//   }
#ifndef MESHNET_CC_PROTOCOL_FRAME_ATTACKS_H_
#define MESHNET_CC_PROTOCOL_FRAME_ATTACKS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "cc/common/status.h"
#include "cc/protocol/frame_codec.h"

namespace meshnet {

class Rng {
 public:
  explicit Rng(uint64_t seed) : engine_(seed) {}
  // Uniform enough in [low, high].
  uint64_t Between(uint64_t low, uint64_t high) {
    const uint64_t range = high - low + 1;
    return range == 0 ? engine_() : low + engine_() % range;
  }
  bool Coin() { return (engine_() >> 32 & 1) != 0; }
  char Byte() { return static_cast<char>(engine_() >> 40); }
  std::string Bytes(size_t size) {
    std::string bytes(size, '\0');
    for (char& byte : bytes) byte = Byte();
    return bytes;
  }

 private:
  std::mt19937_64 engine_;
};

// The seam that all attacks are meant for.
FrameExpectation AttackedSeam();

// A good step as at least `min_fragments` frames. `number` 0: any step number.
std::vector<v1::Frame> GoodFrames(Rng* rng, size_t min_fragments = 1, uint64_t number = 0);

// Serialized frames of which the last one, or the end after it, must be refused for `reason`.
struct Attack {
  std::vector<std::string> messages;
  bool finish = false;
  v1::Reason reason = v1::REASON_UNSPECIFIED;
};

using MakeAttack = std::function<Attack(Rng*)>;

// By name of the kind. No step is completed but step 1, by some duplicates.
std::map<std::string, MakeAttack> FrameAttacks();

// Bytes that make any message malformed when they follow it.
struct BadEnding {
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  std::function<std::string(Rng*)> make;
};

// By name. `max_bytes` is the receiver's bound of one message.
std::map<std::string, BadEnding> BadEndings(uint64_t max_bytes);

// Changes a few bytes, leaves some away, puts some in, or all of it.
std::string Corrupt(std::string bytes, Rng* rng);

// A length-delimited field of a message.
std::string Delimited(uint64_t number, const std::string& content);

}  // namespace meshnet

#endif  // MESHNET_CC_PROTOCOL_FRAME_ATTACKS_H_

// The contract of zero/communicator.h as checks that all ranks of a world run, over any transport, in threads or
// processes. Every rank computes what the others send, so checks need no additional communication. A mismatch is a
// std::runtime_error that names the rank.
#pragma once
#include <cstdint>
#include <memory>

#include <zero/communicator.h>

namespace zero::test {

// Every collective compared bitwise with a naive one: fp32, bf16, fp16 (also bytes and int64 if data is only moved),
// sizes 0, 1, odd and large.
void check_values(const std::shared_ptr<Communicator>& comm);
// `in` as rank's own part of `out` and the other way round; the rest of `in` stays as it was.
void check_aliasing(const std::shared_ptr<Communicator>& comm);
// Two and more operations in flight, waits in any order, inputs overwritten right after the wait.
void check_in_flight(const std::shared_ptr<Communicator>& comm);
// `rounds` random operations with random sizes, dtypes, memory (allocate or plain) and waits.
void check_random_program(const std::shared_ptr<Communicator>& comm, std::uint64_t seed, int rounds);
// Sums whose parts are sent as 8 or 4 bits: within half a scale of each sent part, exact if none is sent. Two
// operations in flight, `out` as a part of `in`, values that are not finite.
void check_quantized(const std::shared_ptr<Communicator>& comm);
// Messages of any length; barrier.
void check_exchange(const std::shared_ptr<Communicator>& comm);
// Calls and bytes, exactly; control apart.
void check_counts(const std::shared_ptr<Communicator>& comm);
// Wrong arguments are ConfigErrors on the rank that passed them, and leave the communicator usable.
void check_arguments(const std::shared_ptr<Communicator>& comm);
// All of the above.
void check_all(const std::shared_ptr<Communicator>& comm);

// The last ones for a communicator, which is unusable afterwards; for worlds of 2 and more.
// Rank 0 sends rank 1 another number of elements than it expects: all throw CommError with both numbers.
void check_parts_differ(const std::shared_ptr<Communicator>& comm);
// `culprit` aborts while the others wait: they throw CommError with its rank and its reason.
void check_abort(const std::shared_ptr<Communicator>& comm, int culprit);
// `absent` does not call for three times the timeout: the others throw CommError that names it.
void check_timeout(const std::shared_ptr<Communicator>& comm, int absent, std::chrono::milliseconds timeout);

}  // namespace zero::test

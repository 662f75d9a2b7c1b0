// A GPU in software, for libtorch as `cuda:0`: what needs no GPU to be shown of code that uses one. libtorch's
// operators run on the CPU as they are enqueued, so results have the CPU's bits; streams and events are clocks, and
// gpu/happens_before.h finds accesses whose order is left to chance, also between a stream and the host (pinned memory
// is protected while an operation may use it) and after a block of memory was freed and taken again. The host cannot
// touch device memory. Only in a program that never loads libtorch's CUDA library.
#pragma once
#include <string>
#include <vector>

namespace zero::test::simulated_gpu {

// Makes libtorch and the engine see the device in this process, for its life. Call it before anything else asks for a
// GPU.
void install();

// In a forked rank, before it uses the device: its number, of `count`; other ranks have the others.
void be_device(int index, int count);

// Whether Mark::reached and the like find an event reached before the host has waited for it. Both occur on a GPU.
void answer_queries_with(bool reached);

// From now on every query fails, as all calls of a GPU that has failed.
void fail_queries();

// Accesses that are not ordered, since the last call.
std::vector<std::string> take_faults();

// What was enqueued since the last call, in order: the stream's number and "aten::mm", "zero::update", ...; and "host
// waits" where the host waited for the device.
std::vector<std::string> take_operations();

}  // namespace zero::test::simulated_gpu

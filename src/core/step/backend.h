// What a training step asks of the world: five interfaces, which a backend implements. One of tensors and collectives
// executes them; DryBackend ignores them, so that the same program forecasts. Buffers are numbers that Memory hands
// out; a View is a range of one.
//
// [Note: threads] The program's thread (forward, step(), backward on a CPU) and autograd's device thread (backward on a
// GPU) call these methods, never both at once. Those marked B are also called by the background job of a delayed
// update. No method calls back into the program. All ranks of an axis issue their collectives in the same order. After
// Work::wait() later operations of the same lane see the result; on a GPU that orders streams and does not block the
// host. Methods throw the four error classes of zero/errors.h; an error ends the step.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <zero/work.h>

#include "step/facts.h"

namespace zero::step {

using WorkPtr = std::shared_ptr<Work>;

// Elements [begin, begin + numel) of a buffer. Buffer 0 is none.
struct View {
  int buffer = 0;
  std::int64_t begin = 0, numel = 0;
  Dtype dtype = Dtype::F32;
  View part(std::int64_t at, std::int64_t count) const { return {buffer, begin + at, count, dtype}; }
  std::int64_t bytes() const { return numel * width(dtype); }
  explicit operator bool() const { return buffer != 0; }
};

// What a buffer holds.
enum class Role {
  Params,
  SecondaryShard,  // hpZ
  PendingParams,   // new values of a delayed update
  Grads,
  PendingGrads,  // handed over to a delayed update
  GradsCopy,     // of the micro-batches before one that may fail
  Master,
  OptimizerState,
  StatesTile,  // on its way from and to the file of optimizer states
  ParamsTile,  // of parameters
  Transfer,    // comes and goes
};

enum class Place { Device, Host, PinnedHost, PeerReadable, Symmetric, IoBuffer, File };
// Streams of a GPU; on a CPU all are the calling thread.
enum class Lane { Compute, Unshard, Reduce, Offload };

struct Allocation {
  Place place = Place::Device;
  std::int64_t bytes = 0;
  Role role = Role::Transfer;
  int axis = 0;  // of Symmetric memory: whose ranks lay their shards side by side
};

class BufferOps {
 public:
  virtual ~BufferOps() = default;
  // `buffer` is unused, and its bytes are booked. A File reads as zeros, other memory is uninitialised. PeerReadable
  // memory is read by all processes of the host. Symmetric memory is a collective of the axis; a View of it counts
  // elements of all ranks' shards side by side, of which this rank may write its own.
  virtual void allocate(int buffer, const Allocation& allocation) = 0;
  // No operation on it is under way.
  virtual void free(int buffer) = 0;
};

// A flat vector in pieces, which every rank of an axis reads from its peers and sums.
struct PeerReduce {
  int group = 0;
  std::vector<std::pair<std::int64_t, View>> pieces;  // offset in the flat vector, memory that peers read
  View out;                                           // this rank's shard of the sum; none: the sum replaces the pieces
  bool to_all = false;                                // without `out`: all ranks' shards of it, not only this rank's
  bool square = false;                                // sum_of_squares(group) is set, too
};

// Over the ranks of a group's axis, where nothing else is said.
class CommOps {
 public:
  virtual ~CommOps() = default;
  // `in` may be the own part of `out`.
  virtual WorkPtr all_gather(int group, View out, View in, Lane lane) = 0;
  // Among the axis's secondary_ranks.
  virtual WorkPtr all_gather_node(int group, View out, View in, Lane lane) = 0;
  // An fp32 sum in rank order, rounded once. bits: sent as integers of so many (qgZ); 0: as it is. Lane::Reduce.
  virtual WorkPtr reduce_scatter(int group, View out, View in, int bits) = 0;
  virtual WorkPtr reduce_pieces(const PeerReduce& request) = 0;
  virtual WorkPtr broadcast(int group, View inout, int root) = 0;
  // Returns when the peers' latest signal_symmetric() of the buffer is visible. Counts as the all-gather it replaces.
  virtual void wait_symmetric(int buffer) = 0;
  // The own shard has been written. All ranks signal equally often.
  virtual void signal_symmetric(int buffer) = 0;
  // Every rank's value, by rank. Blocks. Over all ranks of the run.
  virtual std::vector<double> exchange(double mine) = 0;
  virtual void barrier() = 0;
};

class TensorOps {
 public:
  virtual ~TensorOps() = default;
  // Between any two places, of equal numel; converts dtypes with one rounding. A file is waited for, and reached by way
  // of a little memory of the backend's own.
  virtual void copy(View to, View from, Lane lane) = 0;
  // to += from, with one rounding from fp32.
  virtual void accumulate(View to, View from) = 0;
  virtual void scale(View data, float factor) = 0;
  virtual void fill(View data, float value) = 0;  // B. Of a file as copy()
  // To and from the integers of kernels/quantize.h.
  virtual void quantize(View to, View from, int bits) = 0;
  virtual void dequantize(View to, View from, int bits) = 0;
  // The sum of squares of `values`, kept under a number: sum_of_squares() adds up a group's in order. A step's first
  // pass begins without any.
  virtual void begin_squares(int group) = 0;
  virtual void square(int group, int slot, View values) = 0;
  virtual double sum_of_squares(int group) = 0;
  // Between an IoBuffer and a File; wait() throws IoError, for a wrong checksum too. The IoBuffer is not touched before
  // wait(). B
  virtual WorkPtr read(View to, View file) = 0;
  virtual WorkPtr write(View file, View from) = 0;
};

class ModelOps {
 public:
  virtual ~ModelOps() = default;
  // The group's parameters alias `whole`; of a Symmetric buffer, all ranks' shards side by side.
  virtual void bind(int group, View whole) = 0;
  // They have no data; reading them past the dispatcher throws.
  virtual void unbind(int group) = 0;
  // They have new values: a graph that saved the old ones is refused from now on.
  virtual void values_changed(int group) = 0;
  // The parameter's .grad is that memory from now on.
  virtual void set_gradient(int group, int member, View kept) = 0;
  // No parameter of the group has a .grad from now on.
  virtual void drop_gradients(int group) = 0;
  // The program is done with a gradient that arrived, or with a block that it took. Memory that a .grad, or a program,
  // still refers to lives on.
  virtual void release_gradient(View gradient) = 0;
};

struct UpdateTarget {
  View master, slots[2], param;  // param none: the master is the parameter
  bool param_elsewhere = false;  // not where it rests: all of its range has to be written
};

class UpdateOps {
 public:
  virtual ~UpdateOps() = default;
  // Around all updates of a step: bias correction, learning rates.
  virtual void begin_update() = 0;
  virtual void end_update() = 0;
  // Elements [begin, begin + numel) of the range whose states this rank owns. grads none: the members' own .grad. B
  virtual void update(int group, std::int64_t begin, std::int64_t numel, const UpdateTarget& target, View grads,
                      float factor) = 0;
  // Starts a job on another thread; none is running.
  virtual void run_beside(std::function<void()> job) = 0;
  // Waits for it, and throws what it threw.
  virtual void join() = 0;
};

struct Backend {
  BufferOps& buffers;
  CommOps& comm;
  TensorOps& tensors;
  ModelOps& model;
  UpdateOps& optimizer;
};

}  // namespace zero::step

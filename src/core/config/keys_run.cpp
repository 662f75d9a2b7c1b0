// Keys of parallelism, the built-in model's experts, checkpoints and logging.
#include "config/key_rows.h"

namespace zero::config {

void add_run_keys(std::vector<Key>& keys) {
  Block(keys, "tensor_parallel", &Settings::mesh)
      .key("autotp_size", zero_for_one(&MeshSettings::tensor),
           "ranks that share one copy of the model's cut weights; 0 and 1: off", at_least(0), at_most(65536))
      .key("preset_model",
           one_of(&MeshSettings::preset_model, "gpt llama qwen2 phi3 bloom chatglm mixtral deepseek_v2"),
           "which weights are cut, by the names of a known model", nullable(), needs(When::TensorParallel))
      .key("partition_config", unstored<MeshSettings>(Type::Block),
           "which weights are cut, by patterns of parameter names (docs/parallelism.md)", nullable(),
           needs(When::TensorParallel))
      .key("vocab_parallel_lm_head", in(&MeshSettings::plan, &TpPlan::vocab_parallel_lm_head),
           "logits of a cut head stay divided over the vocabulary, for zero::tp::cross_entropy",
           needs(When::TensorParallel));
  Block(keys, "").key("use_data_before_expert_parallelism", in(&Settings::mesh, &MeshSettings::data_before_experts),
                      "false: neighbouring ranks have different experts; true: the same (DeepSpeed: D+E)");
  Block(keys, "libzero.model.experts", &Settings::model, &ModelSettings::experts)
      .key("num_experts", &ExpertSettings::num_experts,
           "experts (zero/moe.h) in place of the MLP of a block; 0: none (--num-experts)", at_least(0), at_most(65536))
      .each(needs(When::Experts))
      .key("expert_interval", &ExpertSettings::expert_interval,
           "every so many blocks one has experts; 2: the second, the fourth, ...", at_least(1), at_most(1000))
      .key("ep_size", &ExpertSettings::ep_size,
           "ranks that share the experts of a block; divides num_experts and the ranks (--ep-world-size)", at_least(1),
           at_most(65536))
      .key("k", &ExpertSettings::k, "experts of a token (--top-k)", at_least(1), at_most(65536))
      .key("capacity_factor", &ExpertSettings::capacity_factor,
           "an expert takes at most max(ceil(tokens / num_experts * factor * k), min_capacity) of a rank's tokens",
           above(0))
      .key("eval_capacity_factor", &ExpertSettings::eval_capacity_factor, "the same in evaluation", above(0))
      .key("min_capacity", &ExpertSettings::min_capacity, "tokens that an expert takes in any case", at_least(0),
           unit("tokens"))
      .key("drop_tokens", &ExpertSettings::drop_tokens, "false: experts take all their tokens")
      .key("use_rts", &ExpertSettings::use_rts, "k 1, in training: random tokens are dropped, not the last ones")
      .key("top2_2nd_expert_sampling", &ExpertSettings::top2_2nd_expert_sampling, "k 2: the second expert is drawn")
      .key("noisy_gate_policy", one_of(&ExpertSettings::noisy_gate_policy, "None Jitter RSample"),
           "noise of the gate in training: Jitter on its input; RSample on its logits, k 1")
      .key("use_residual", &ExpertSettings::use_residual, "adds a dense expert for all tokens (PR-MoE)")
      .key("aux_loss", &ExpertSettings::aux_loss,
           "factor of the sum of the blocks' auxiliary losses in the loss (--aux-loss)", at_least(0));
  Block(keys, "checkpoint", &Settings::checkpoint)
      .key("tag_validation", one_of(&CheckpointSettings::tag_validation, "Warn Ignore Fail"),
           "reaction if ranks pass different tags")
      .key("writer.decoupled", &CheckpointSettings::decoupled,
           "write checkpoints while training continues; finish_checkpoint() or a later step() completes them")
      .key("writer.show_statistics", &CheckpointSettings::show_statistics,
           "log bytes, seconds and stalls of a save in the background");
  Block(keys, "libzero", &Settings::checkpoint)
      .key("private_buffers",
           words(&CheckpointSettings::private_buffers, {{"modulo", PrivateBuffers::Modulo},
                                                        {"rank0", PrivateBuffers::Rank0},
                                                        {"mean", PrivateBuffers::Mean},
                                                        {"error", PrivateBuffers::Error}}),
           "loading on another number of ranks: buffers that differed between ranks (rank r takes rank r mod saved's)")
      .key("verify_on_load",
           words(&CheckpointSettings::verify_on_load,
                 {{"used", VerifyOnLoad::Used}, {"full", VerifyOnLoad::Full}, {"sizes", VerifyOnLoad::Sizes}}),
           "what a load compares with its hashes: used: the bytes it uses; full: every file before anything is loaded; "
           "sizes: nothing, files have their sizes")
      .key("checkpoint_memory", bytes(&CheckpointSettings::memory),
           "bytes of states per rank that a save in the background may hold in host memory for its writer",
           at_least(8388608), unit("bytes"))
      .key("keep_snapshot_every", &CheckpointSettings::keep_every,
           "steps between snapshots that keep_snapshot() keeps in memory for a restart by `zero run --restarts` "
           "(--keep-snapshot-every); 0: none",
           at_least(0))
      .key("save_errors", words(&CheckpointSettings::save_errors_warn, {{"throw", false}, {"warn", true}}),
           "a save in the background that failed: throw, or warn and throw the third in a row");
  Block(keys, "")
      .key("steps_per_print", &Settings::steps_per_print, "print a line every this many steps; null: never",
           at_least(1))
      .key("wall_clock_breakdown", &Settings::wall_clock_breakdown,
           "print the milliseconds of forward, backward, reduce and step with each line")
      .key("memory_breakdown", &Settings::memory_breakdown,
           "print current and peak bytes after forward, backward and step with each line")
      .key("dump_state", &Settings::dump_state, "print the effective configuration once")
      .key("log_level", one_of(&Settings::log_level, "debug info warning error critical"), "log level; null: info");
  Block(keys, "tensorboard", &Settings::tensorboard)
      .key("enabled", &MonitorSettings::enabled, "write TensorBoard event files")
      .key("output_path", &MonitorSettings::output_path, "directory of event files", needs(When::TensorBoard))
      .key("job_name", &MonitorSettings::job_name, "sub-directory", needs(When::TensorBoard));
  Block(keys, "csv_monitor", &Settings::csv_monitor)
      .key("enabled", &MonitorSettings::enabled, "write one CSV file per metric")
      .key("output_path", &MonitorSettings::output_path, "directory of CSV files", needs(When::CsvMonitor))
      .key("job_name", &MonitorSettings::job_name, "sub-directory", needs(When::CsvMonitor));
  Block(keys, "")
      .key("sequence_parallel_size", in(&Settings::mesh, &MeshSettings::sequence),
           "ranks that share the tokens of each sample", at_least(1), at_most(65536))
      .key("data_parallel_size", &Settings::data_parallel_size,
           "must equal the number of ranks / (tensor_parallel.autotp_size x sequence_parallel_size)", at_least(1));
}

}  // namespace zero::config

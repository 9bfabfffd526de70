#!/usr/bin/env bash
# The sanity test of arXiv 2510.26788 under a patched OAT, on the GPUs of one node: every regime, objective and seed that
# is asked for, one run after another, all with the same settings and evaluated equally often. docs/how-to/oat.md
#   make apply-patches OAT=/path/to/site-packages                          once
#   make sanity-math                                                       the data, once
#   OAT_PYTHON=/path/to/bin/python PRECISION='bf16 fp16' scripts/launch/oat_sanity.sh
#   ALGO='grpo pg_is' SEED='1 2 3' … scripts/launch/oat_sanity.sh [--dry-run] --use-wb …      further arguments of OAT's
# A run leaves OUT/ALGO-PRECISION-seedSEED_TIME; make compare RUNS='fp16=OUT/grpo-fp16-seed* …' puts them side by side.
set -euo pipefail

# The knobs: set them here or in the environment. The first three take several values.
PRECISION=${PRECISION:-fp16}             # bf16 bf16_train_fp16_infer fp32
ALGO=${ALGO:-dr_grpo}                    # grpo tis mis pg_is
SEED=${SEED:-1}
GPUS=${GPUS:-8}                          # of this node, learners and actors share them; a divisor of 64
MODEL=${MODEL:-deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B} # or a folder
TEMPLATE=${TEMPLATE:-r1_distill_qwen}    # OAT's --prompt_template: the model's
TRAIN=${TRAIN:-}                         # a folder that datasets wrote, default data/sanity-math/oat
EVAL=${EVAL:-}                           # the same to evaluate on, default TRAIN
TEST_SPLIT=${TEST_SPLIT:-test}           # the splits of EVAL, as aime,math
EVAL_STEPS=${EVAL_STEPS:-16}             # rounds between two evaluations
EPOCHS=${EPOCHS:-20}                     # over the problems, of 22 rounds; configs/experiment/sanity_8gpu.yaml has as many
OUT=${OUT:-}                             # default outputs/oat-sanity
OAT_PYTHON=${OAT_PYTHON:-python}         # of the environment that has OAT
PYTHON=${PYTHON:-}                       # of the patch tool, default the first python3 of 3.10 or later on PATH

further=("$@") # what knobs.sh would take for Hydra overrides
if [[ ${1-} == --dry-run ]]; then
  further=("${@:2}")
  set -- --dry-run
else
  set --
fi
# shellcheck source=scripts/launch/knobs.sh
source "$(dirname "$0")/knobs.sh"
[[ ${further[0]-} != [!-]* ]] || refuse "${further[0]}: must be --dry-run, in the first place, or an argument of OAT, like --use-wb"
for word in "${further[@]}"; do
  name=${word%%=*}
  case ${name//_/-} in
    --dry-run) refuse "$word: must be --dry-run, as the first argument" ;;
    --help | -h) refuse "$word: the knobs are listed at the top of the script; docs/how-to/oat.md describes the rest" ;;
    --critic-type | --reinforce-update | --no-reinforce-update | --tis-c | --rollout-is | --rollout-is-threshold | --rollout-rs | --rollout-rs-threshold)
      refuse "$word: set ALGO" ;;
    --gpus) refuse "$word: set GPUS" ;;
    --num-prompt-epoch) refuse "$word: set EPOCHS" ;;
    --precision | --bf16 | --no-bf16 | --fp16 | --no-fp16) refuse "$word: set PRECISION" ;;
    --seed) refuse "$word: set SEED" ;;
    --eval-steps) refuse "$word: set EVAL_STEPS" ;;
    --save-path | --wb-run-name) refuse "$word: set OUT; a run is named by ALGO, PRECISION and SEED" ;;
  esac
done
whole GPUS EVAL_STEPS EPOCHS
prompts=64 answers=8 batch=128 # of a round, of a prompt; answers of an update
((prompts % GPUS == 0)) || refuse "GPUS=$GPUS: must divide the $prompts prompts of a round"
TRAIN=$(realpath -m "${TRAIN:-$checkout/data/sanity-math/oat}")
EVAL=$(realpath -m "${EVAL:-$TRAIN}")
OUT=$(realpath -m "${OUT:-$checkout/outputs/oat-sanity}")
if [[ $MODEL == [./]* ]]; then
  [[ -f $MODEL/config.json ]] || refuse "MODEL=$MODEL: contains no config.json"
  MODEL=$(realpath "$MODEL")
fi

split() { # split NAME SPLIT: the folder must contain it, with problems and answers
  local facts=${!1}/$2/dataset_info.json
  [[ -f $facts ]] || refuse "$1=${!1}: has no split $2 as datasets' save_to_disk writes it; make sanity-math writes data/sanity-math/oat"
  for column in problem answer; do
    grep -q "\"$column\"" "$facts" || refuse "$1=${!1}: its split $2 has no column $column"
  done
}
split TRAIN train
IFS=, read -ra splits <<<"$TEST_SPLIT"
for each in "${splits[@]}"; do split EVAL "$each"; done

oat=$("$OAT_PYTHON" -c 'from importlib.util import find_spec; print(find_spec("oat").origin)' 2>/dev/null) || oat=''
oat=${oat%/__init__.py}
[[ -d $oat ]] || refuse "OAT_PYTHON=$OAT_PYTHON: has no OAT; give a Python that has it"
find_python
facts=$("$PYTHON" "$checkout/scripts/verl_precision" status --framework oat --json "${oat%/*}") || [[ $facts ]] || exit 1
mapfile -t facts < <("$PYTHON" -c 'import json, sys; print(*map(json.load(sys.stdin).get, ("state", "release", "detail")), sep="\n")' <<<"$facts")
state=${facts[0]} release=${facts[1]}
case $state in
  patched) ;;
  unpatched | outdated) refuse "OAT_PYTHON=$OAT_PYTHON: its OAT is $state; make apply-patches OAT=${oat%/*}" ;;
  *) refuse "OAT_PYTHON=$OAT_PYTHON: its OAT is $state: ${facts[2]}" ;;
esac
templates=$(grep -oP '^    "\K\w+(?=": apply_)' "$oat/experiment/run_math_rl.py" | paste -sd, | sed 's/,/, /g')
[[ ", $templates," == *", $TEMPLATE,"* ]] || refuse "TEMPLATE=$TEMPLATE: OAT $release has $templates"

# The settings of the authors' scripts, which differ only in objective, dtype and evaluation interval:
# oat/scripts/sanity of github.com/sail-sg/Precision-RL (October 2025). What is ours: docs/how-to/oat.md.
settings=(
  --gpus "$GPUS" --collocate --vllm_sleep --vllm_gpu_ratio 0.6 --enable_prefix_caching
  --zero-stage 2 --gradient-checkpointing
  --pretrain "$MODEL" --prompt_template "$TEMPLATE"
  --oracle_type reward --oracle math --verifier_version math_verify
  --learning_rate 1e-6 --lr_scheduler constant --num_ppo_epochs 1 --beta 0
  --prompt_data "$TRAIN" --train_split train --input_key problem --output_key answer --max-train 9999999
  --num_prompt_epoch "$EPOCHS" --prompt_max_length 1024
  --num_samples "$answers" --temperature 1 --top_p 1 --generate_max_length 8192 --max_model_len 50000
  --train_batch_size "$batch" --train_batch_size_per_device 1
  --rollout_batch_size "$prompts" --rollout_batch_size_per_device "$((prompts / GPUS))"
  --pi_buffer_maxlen_per_device "$((prompts * answers / GPUS))"
  --eval_data "$EVAL" --test_split "$TEST_SPLIT" --eval_steps "$EVAL_STEPS" --eval_batch_size 1 --eval_n 32
  --eval_temperature 0.6 --eval_top_p 0.95 --eval_generate_max_length 8192
  --save_path "$OUT" --save_steps -1
)
case $release in
  0.1.4 | 0.2.0) ;;            # OAT's own weights are on by default, in all that have them
  *) settings+=(--tis_c None) ;;
esac

objective() { # objective ALGO: its own settings, in ${chosen[@]}
  case $1 in
    grpo) chosen=(--critic_type grpo) ;;
    dr_grpo) chosen=(--critic_type drgrpo) ;; # what the paper calls GRPO
    tis) chosen=(--critic_type drgrpo --rollout_is token --rollout_is_threshold 2) ;;
    mis) chosen=(--critic_type drgrpo --rollout_is sequence --rollout_is_threshold 10 --rollout_rs sequence --rollout_rs_threshold 10) ;;
    pg_is) chosen=(--critic_type drgrpo --reinforce_update --rollout_is sequence --rollout_is_threshold inf) ;;
    *) refuse "ALGO=$1: must be one of grpo, dr_grpo, tis, mis, pg_is" ;;
  esac
}

names=()
for seed in $SEED; do
  [[ $seed =~ ^(0|[1-9][0-9]*)$ ]] || refuse "SEED=$seed: must be a whole number"
  for algo in $ALGO; do
    objective "$algo"
    for precision in $PRECISION; do
      regimes=$(basename -s .yaml "$checkout"/configs/precision/*.yaml | paste -sd, | sed 's/,/, /g')
      [[ ", $regimes," == *", $precision,"* ]] || refuse "PRECISION=$precision: must be one of $regimes"
      name=$algo-$precision-seed$seed
      there=$(compgen -G "$OUT/${name}_*") && refuse "OUT=$OUT: contains ${there%%$'\n'*} already; choose another OUT, or leave out $name"
      [[ " ${names[*]} " != *" $name "* ]] || refuse "$name: is requested twice"
      names+=("$name")
    done
  done
done

((${#names[@]})) || refuse "PRECISION=$PRECISION ALGO=$ALGO SEED=$SEED: must each have a value"

ended() { # ended NAME: OAT repeats its last round with the evaluation after it; its exit code is no evidence, launchpad's is 0
  tail -qn2 "$OUT/$1"_*/metrics.jsonl 2>/dev/null | cut -d, -f1 | uniq -d | grep -q step
}

trap 'exit 130' INT
failed=()
for name in "${names[@]}"; do
  IFS=- read -r algo precision seed <<<"$name"
  objective "$algo"
  attention=--flash-attn
  if [[ $precision == fp32 ]]; then attention=--no-flash-attn; fi # it computes only in 16 bits
  command=("$OAT_PYTHON" -m oat.experiment.run_math_rl --precision "$precision" "$attention" "${chosen[@]}" "${settings[@]}"
    --seed "${seed#seed}" --wb_run_name "$name" "${further[@]}")
  if [[ $dry_run ]]; then
    show "${command[@]}"
  else
    echo "oat_sanity: $name"
    "${command[@]}" && ended "$name" || failed+=("$name")
  fi
done
((!${#failed[@]})) || refuse "these runs failed: ${failed[*]}"

# What the scripts train_NAME.sh share: data, training, export, figures with each replanning schedule, model card.
# A script that was stopped goes on where it was: each stage finds what an earlier call has left.
#
# Set in the environment, if wanted:
#   EPISODES, RESOLUTION      the dataset's size (10000 episodes of 224 px, 20000 for Push-T, 16000 for Cube); it is
#                             data/NAME.h5
#   DATA                      another file; one that is there is taken as it is
#   DEMOS                     demonstrations to replay, for Push-T
#   EXPLORATION               up to this share of an episode's actions are not the expert's (0; 0.6 for Cube)
#   MISTAKES                  for up to this share of an episode the expert takes the cube to be elsewhere (0; 0.7 for Cube)
#   PRESET, STEPS             the preset (by default of the environment's name) and its number of steps (30000 for Push-T)
#   LAUNCH                    "torchrun --nproc-per-node 8 -m lewm" trains on eight GPUs
#   RUN, OUT                  the run's folder and the exported model's (runs/NAME, pretrained/NAME)
#   EVAL_EPISODES, EVAL_JOBS  pairs per evaluation (200); how many of the twelve evaluations run at a time (1;
#                             with more, the card's seconds per plan are those of a shared device)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

# Measure the exported model once: evaluate OUT RESULTS [options of `lewm eval`]
evaluate() {
    local model=$1 results=$2
    shift 2
    [[ -e $results ]] || lewm eval "$model" --out "$results" "$@"
}

# All of it: pipeline NAME [options of `lewm train`]. Settings that were best on tuning pairs (docs/notebook/search.md) are
# measured beside the paper's CEM.
pipeline() {
    local name=$1 demos="" case manifest schedule planner options
    shift
    local data=${DATA:-data/$name.h5} run=${RUN:-runs/$name} out=${OUT:-pretrained/$name} pairs=${EVAL_EPISODES:-200}
    local figures=$run/evaluations results=()
    # Of a file that is there, `lewm collect` says whether it is the one that is meant.
    if [[ -z ${DATA:-} || ! -e $data ]]; then
        [[ $name != pusht ]] || demos=${DEMOS:?is not set: name the demonstrations, an .npz file or a LeRobot dataset}
        lewm collect "$name" --episodes "${EPISODES:-10000}" --resolution "${RESOLUTION:-224}" --frame-stride 5 \
            ${demos:+--demos "$demos"} --exploration "${EXPLORATION:-0}" --mistakes "${MISTAKES:-0}" --out "$data"
    fi
    ${LAUNCH:-lewm} train "${PRESET:-$name}" --env "$name" --data "$data" --out "$run" \
        ${STEPS:+--train.steps "$STEPS"} "$@"
    lewm export "$run" "$out"
    # Nothing is chosen by these figures: all of them are reported.
    for case in {paper,strict}:{whole,shrinking}:{cem,tuned} paper:{soonest,receding}:{cem,tuned}; do
        IFS=: read -r manifest schedule planner <<<"$case"
        options=(--manifest "$manifest" --plan.schedule "$schedule")
        if [[ $planner == tuned ]]; then options+=(--tuned); else options+=(--solver "$planner"); fi
        results+=("$figures/${manifest}_${schedule}_${planner}_$pairs.json")
        (($(jobs -rp | wc -l) < ${EVAL_JOBS:-1})) || wait -n
        evaluate "$out" "${results[-1]}" --eval.episodes "$pairs" "${options[@]}" &
    done
    while (($(jobs -p | wc -l))); do wait -n; done
    lewm export "$run" "$out" --evaluations "${results[@]}"
}

# What the scripts train_NAME.sh share: data, training, export, figures with each replanning schedule, model card.
# A script that was stopped goes on where it was: each stage finds what an earlier call has left.
#
# Set in the environment, if wanted:
#   EPISODES, RESOLUTION      the dataset's size (10000 episodes of 224 px), DATA its file, made if there is none
#   DEMOS                     demonstrations to replay, for Push-T
#   PRESET, STEPS             the preset (by default of the environment's name) and its number of steps
#   LAUNCH                    "torchrun --nproc-per-node 8 -m lewm" trains on eight GPUs
#   RUN, OUT                  the run's folder and the exported model's (runs/NAME, pretrained/NAME)
#   EVAL_EPISODES             pairs per evaluation (200)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH"

# Measure the exported model once: evaluate OUT RESULTS [options of `lewm eval`]
evaluate() {
    local model=$1 results=$2
    shift 2
    [[ -e $results ]] || lewm eval "$model" --out "$results" "$@"
}

# The schedule of the results file with the most successes, by the paper's protocol and then by the strict one.
best_schedule() {
    python - "$@" <<'PY'
import json, sys

def key(document):
    rates = document["rates"]
    return [rates[f"planning with the world model{ending}"]["rate"] for ending in ("", ", strict")]

documents = [json.load(open(path)) for path in sys.argv[1:]]
print(max(documents, key=key)["config"]["plan"]["schedule"])
PY
}

# All of it: pipeline NAME [options of `lewm train`]
pipeline() {
    local name=$1 demos="" schedule best strict
    shift
    local data=${DATA:-data/$name.h5} run=${RUN:-runs/$name} out=${OUT:-pretrained/$name} pairs=${EVAL_EPISODES:-200}
    local figures=$run/evaluations results=()
    if [[ ! -e $data ]]; then
        [[ $name != pusht ]] || demos=${DEMOS:?is not set: name the demonstrations, an .npz file or a LeRobot dataset}
        lewm collect "$name" --episodes "${EPISODES:-10000}" --resolution "${RESOLUTION:-224}" --frame-stride 5 \
            ${demos:+--demos "$demos"} --out "$data"
    fi
    ${LAUNCH:-lewm} train "${PRESET:-$name}" --env "$name" --data "$data" --out "$run" \
        ${STEPS:+--train.steps "$STEPS"} "$@"
    lewm export "$run" "$out"
    for schedule in whole shrinking soonest receding; do
        results+=("$figures/${schedule}_$pairs.json")
        evaluate "$out" "$figures/${schedule}_$pairs.json" --eval.episodes "$pairs" --plan.schedule "$schedule"
    done
    best=$(best_schedule "${results[@]}")
    strict=$figures/${best}_strict_$pairs.json
    evaluate "$out" "$strict" --eval.episodes "$pairs" --plan.schedule "$best" --manifest strict
    lewm export "$run" "$out" --evaluations "${results[@]}" "$strict"
}

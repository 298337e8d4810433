#!/usr/bin/env bash
# Every number of docs/notebook/comparison.md, from data to page. What was stopped goes on where it was, and what is there is
# not made again: each stage can be repeated. methods.tsv, worlds.tsv and planners.tsv beside this file say what there is.
#
# Set in the environment, if wanted:
#   WORLDS, METHODS           names from worlds.tsv and rows from methods.tsv (all of them)
#   SEEDS                     of the training runs (0); each has a figure of its own
#   BLOCKS                    of the table (paper best); `equal` is planning with FLOPS operations per plan (3.1e12)
#   PLANNERS                  rows of planners.tsv that are tried for the block best, on TUNING_PAIRS pairs (100)
#   STAGES                    of the work (data train eval page)
#   PRESET, STEPS, EPISODES   instead of each world's own preset, steps and episodes; RESOLUTION (224) of the frames
#   EVAL_EPISODES             frozen pairs per evaluation (200)
#   DATA, OUT                 the folders of datasets (data) and of runs and results (runs/comparison)
#   PAGES                     that have markers to write between (docs/notebook/comparison.md README.md); figures lie beside
#                             the first
#   RECORD                    the folder of the blocks' results as JSON, and of all results in one archive (runs/paper)
#   DEMOS                     demonstrations to replay, for Push-T
#   LAUNCH                    "torchrun --nproc-per-node 8 -m lewm" trains on eight GPUs
#   DEVICE                    of training and evaluation (auto)
#   TABLES                    the folder of methods.tsv, worlds.tsv and planners.tsv (runs/paper)
#   DRY                       if it is set, commands are printed, and nothing is done
set -euo pipefail
shopt -s inherit_errexit
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PATH="$PWD/.venv/bin:$PATH"

tables=${TABLES:-runs/paper} out=${OUT:-runs/comparison} data=${DATA:-data}
pages=${PAGES:-docs/notebook/comparison.md README.md} record=${RECORD:-runs/paper}
blocks=${BLOCKS:-paper best} seeds=${SEEDS:-0} stages=${STAGES:-data train eval page}

# The lines of a table, and one column of the line with a given name. Columns are apart by "|".
lines() { grep -Ev '^ *(#|$)' "$tables/$1.tsv"; }
names() { lines "$1" | cut -d'|' -f1 | xargs; }
field() {
    local found
    found=$(lines "$1" | awk -F'|' -v name="$2" -v n="$3" '{ key = $1; gsub(/^ +| +$/, "", key) } key == name { print $n; f = 1 } END { exit !f }') ||
        { echo "$2 is not in $tables/$1.tsv, which has: $(names "$1")" >&2; return 1; }
    xargs <<<"$found"
}
run() {
    echo "+ $*"
    [[ -n ${DRY:-} ]] || "$@"
}

worlds=${WORLDS:-$(names worlds)} methods=${METHODS:-$(names methods)} planners=${PLANNERS:-$(names planners)}
for world in $worlds; do field worlds "$world" 1 >/dev/null; done
for row in $methods; do field methods "$row" 1 >/dev/null; done
for planner in $planners; do field planners "$planner" 1 >/dev/null; done
for block in $blocks; do
    [[ $block =~ ^(paper|best|equal)$ ]] || { echo "BLOCKS has $block; there are: paper best equal" >&2; exit 1; }
done

label() { [[ $2 == 0 ]] && echo "$1" || echo "$1.seed$2"; } # of ROW and SEED
run_of() { echo "$out/$1/runs/$(label "$2" "$3")"; }         # of WORLD, ROW, SEED

collect() { # WORLD
    local file=$data/$1.h5 demos=()
    [[ ! -e $file ]] || return 0 # it appears when it is whole, and one of your own is taken as it is
    if [[ $1 == pusht ]]; then
        demos=(--demos "${DEMOS:?is not set: name the demonstrations, an .npz file or a LeRobot dataset}")
    fi
    # shellcheck disable=SC2046
    run lewm collect "$1" --episodes "${EPISODES:-$(field worlds "$1" 2)}" --resolution "${RESOLUTION:-224}" \
        --frame-stride 5 "${demos[@]}" $(field worlds "$1" 3) --out "$file"
}

# A run that is complete leaves its command beside it. With other options, or if the model whose features it reads was
# trained since, it is done again, which continues it or says why not.
train() { # WORLD ROW SEED
    local world=$1 row=$2 seed=$3 folder options own="" eyes="" command
    folder=$(run_of "$world" "$row" "$seed")
    options=$(field methods "$row" 4)
    if [[ $options == *@lewm* ]]; then
        [[ $row != lewm ]] || { echo "The row lewm cannot be made of itself: see $tables/methods.tsv" >&2; return 1; }
        train "$world" lewm "$seed"
        eyes=$(run_of "$world" lewm "$seed")
        options=${options//@lewm/$eyes}
    fi
    options=${options//@steps/$(field worlds "$world" 6)}
    [[ $row != lewm ]] || own=$(field worlds "$world" 4)
    # shellcheck disable=SC2206
    command=(${LAUNCH:-lewm} train "${PRESET:-$world}" --method "$(field methods "$row" 2)" --env "$world" --seed "$seed"
        --data "$data/$world.h5" --out "$folder" --device "${DEVICE:-auto}" $own $options ${STEPS:+--train.steps "$STEPS"})
    [[ ! -d $folder || ! -e $folder.done || $(<"$folder.done") != "${command[*]}" || ( -n $eyes && $eyes.done -nt $folder.done ) ]] ||
        return 0
    run "${command[@]}"
    [[ -n ${DRY:-} ]] || echo "${command[*]}" >"$folder.done"
}

# Results leave the command that asked for them beside them. With other options, or if the model was trained on since, it
# is asked again: `lewm eval` says whether what is there still holds.
evaluate() { # RESULTS WORLD ROW SEED [options]
    local results=$1 world=$2 folder command
    folder=$(run_of "$2" "$3" "$4")
    shift 4
    command=(lewm eval "$folder" --env "$world" --out "$results" --device "${DEVICE:-auto}" "$@")
    [[ ! -e $results || ! -e $results.done || $(<"$results.done") != "${command[*]}" || $folder.done -nt $results ]] || return 0
    run "${command[@]}"
    [[ -n ${DRY:-} ]] || { touch "$results" && echo "${command[*]}" >"$results.done"; }
}

# The same number of tries for every method that plans, on the same tuning pairs; the best counts, the first of equals.
best_planner() { # WORLD ROW SEED -> its name
    local planner results=()
    [[ $planners == *" "* ]] || { echo "$planners"; return; }
    [[ -e $out/$1/tuning/$1_tuning.json ]] ||
        LEWM_PUSHT_DEMOS=${DEMOS:-${LEWM_PUSHT_DEMOS:-}} run runs/tuning_manifests.sh "$1" "${TUNING_PAIRS:-100}" "$out/$1/tuning" >&2
    for planner in $planners; do
        results+=("$out/$1/tuning/$planner/$(label "$2" "$3").json")
        # shellcheck disable=SC2046
        evaluate "${results[-1]}" "$1" "$2" "$3" --manifest "$out/$1/tuning/$1_tuning.json" \
            --eval.episodes "${TUNING_PAIRS:-100}" $(field planners "$planner" 2) >&2
    done
    if [[ -n ${DRY:-} ]]; then echo "${planners%% *}"; else python runs/paper/page.py best "${results[@]}"; fi
}

take_over() { # RESULTS as RESULTS
    ! cmp -s "$1" "$2" || return 0
    run install -D "$1" "$2.copy" # it appears when it is whole
    run mv "$2.copy" "$2"
}

measure() { # WORLD ROW SEED
    local block options planner file answered
    for block in $blocks; do
        file=$out/$1/$block/$(label "$2" "$3").json answered=$out/$1/paper/$(label "$2" "$3").json
        options=(--eval.episodes "${EVAL_EPISODES:-200}")
        [[ $block == paper || $(field methods "$2" 3) == plans ]] || continue
        if [[ $block == best ]]; then
            planner=$(best_planner "$1" "$2" "$3")
            if [[ -z $(field planners "$planner" 2) ]]; then # the block paper asks the same
                evaluate "$answered" "$@" "${options[@]}"
                take_over "$answered" "$file"
                continue
            fi
            # shellcheck disable=SC2207
            options+=($(field planners "$planner" 2))
        elif [[ $block == equal ]]; then
            # shellcheck disable=SC2207
            options+=(--fixed-flops "${FLOPS:-3.1e12}" $(field methods "$2" 5))
        fi
        evaluate "$file" "$1" "$2" "$3" "${options[@]}"
    done
}

# All that was found so far in a block, each named by its row and seed, the rows in the order of the table.
compared() { # BLOCK -> NAME=FILE ...
    local world row seed file
    for world in $worlds; do
        for row in $methods; do
            for seed in $seeds; do
                file=$out/$world/$1/$(label "$row" "$seed").json
                [[ ! -e $file ]] || echo "$(label "$row" "$seed")=$file"
            done
        done
    done
}

# What calls on other machines have found: a page has the rows of all of them. What is here already counts more.
unpack() {
    [[ -n ${DRY:-} || ! -e $record/evaluations.tar.xz ]] ||
        { mkdir -p "$out" && tar -xJf "$record/evaluations.tar.xz" -C "$out" --skip-old-files; }
}
pack() { # it appears when it is whole; the same results make the same file
    local archive=$record/evaluations.tar.xz
    [[ -z ${DRY:-} && -d $out ]] || return 0
    (cd "$out" && find . '(' -name '*.json' -o -name '*.json.done' ')' ! -path '*/runs/*' -o -path '*/runs/*.done' ! -path '*/runs/*/*') | LC_ALL=C sort |
        tar --mtime=2026-01-01 --owner=0 --group=0 --numeric-owner --mode=644 -cJf "$archive.part" -C "$out" -T -
    mv "$archive.part" "$archive"
}

for stage in $stages; do
    case $stage in
    data) for world in $worlds; do collect "$world"; done ;;
    train) for world in $worlds; do for row in $methods; do for seed in $seeds; do train "$world" "$row" "$seed"; done; done; done ;;
    eval) for world in $worlds; do for row in $methods; do for seed in $seeds; do measure "$world" "$row" "$seed"; done; done; done ;;
    page)
        unpack
        for block in $blocks; do
            mapfile -t files < <(compared "$block")
            kinds=()
            for world in $worlds; do
                [[ ${files[*]} != *"=$out/$world/"* ]] || kinds+=(--by "$(field worlds "$world" 5)")
            done
            [[ ${#files[@]} == 0 ]] || run lewm compare "${files[@]}" "${kinds[@]}" --json "$record/results_$block.json" \
                --figure "${pages%%.md*}_$block.png"
        done
        for page in $pages; do run python runs/paper/page.py write "$out" --page "$page" --tables "$tables"; done
        pack
        ;;
    *) echo "STAGES has $stage; there are: data train eval page" >&2; exit 1 ;;
    esac
done

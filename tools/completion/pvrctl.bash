# SPDX-License-Identifier: Apache-2.0
# Completion of pvrctl for bash.

_pvrctl_models() {
    pvrctl "${buses[@]}" models --json 2>/dev/null | tr '{' '\n' | sed -n 's/.*"name": "\([^"]*\)".*/\1/p'
}

_pvrctl() {
    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command='' action='' i buses=()
    local jobs='--device --model --priority --share'
    local text="$jobs -n --max-tokens --temp --top-k --top-p --min-p --repeat-penalty --frequency-penalty --presence-penalty --dry --mirostat --logit-bias --seed --stop --system --context --kv"
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
            --bus) buses=(--bus "${COMP_WORDS[i + 1]}"); ((i++)) ;;
            -*) ;;
            *) if [[ -z $command ]]; then command=${COMP_WORDS[i]}; elif [[ -z $action ]]; then action=${COMP_WORDS[i]}; fi ;;
        esac
    done
    case $before in
        --bus) mapfile -t COMPREPLY < <(compgen -W 'user system' -- "$word"); return ;;
        --device) mapfile -t COMPREPLY < <(compgen -W 'auto gpu cpu' -- "$word"); return ;;
        --profile) mapfile -t COMPREPLY < <(compgen -W 'axe-1-16m bxm-4-64 bxs-4-64 old phone' -- "$word"); return ;;
        --unchanged) mapfile -t COMPREPLY < <(compgen -W 'exact tolerant off' -- "$word"); return ;;
        --kv) mapfile -t COMPREPLY < <(compgen -W 'f16 q8' -- "$word"); return ;;
        --weights) mapfile -t COMPREPLY < <(compgen -W 'f16 q8 q4' -- "$word"); return ;;
        --format) mapfile -t COMPREPLY < <(compgen -W 'y4m png jpeg' -- "$word"); return ;;
        --model) mapfile -t COMPREPLY < <(compgen -W "$(_pvrctl_models)" -- "$word"); return ;;
    esac
    local options='--bus --json --help' words=''
    case $command in
        '') options+=' --version'; words='status devices models generate chat extract classify embed compile export upscale compare camera jobs top trace hold config stats shader bench doctor' ;;
        devices) options+=' -v --verbose' ;;
        hold) options+=' --reason' ;;
        jobs) options+=' -a --all' ;;
        top) options+=' -n --count -d --delay -a --all' ;;
        trace) options+=' --seconds' ;;
        generate) options+=" $text --raw --top5 --logprobs" ;;
        chat) options+=" $text --no-history" ;;
        extract) options+=" $jobs --context --kv --instruction -n --max-tokens" ;;
        classify) options+=" $jobs --context --question --raw-scores -l --label" ;;
        embed) options+=" $jobs --context --pooling" ;;
        compile) options+=' -o --output --weights --calibrate --profile --name --licence --explain --without --rate' ;;
        export) options+=' --mpv' ;;
        upscale) options+=" $jobs --scale --size --tile --overlap --unchanged --precision --realtime --fps --debug-tiles --format --raw" ;;
        camera) options+=" $jobs --scale --size --from --to --capture --jpeg --timeout --print" ;;
        compare) options+=" $jobs --scale --size --truth --crop" ;;
        models)
            case $action in
                '') words='list add remove' ;;
                add) options+=' --name --licence --origin --replace --weights' ;;
                remove) words=$(_pvrctl_models) ;;
            esac ;;
        shader)
            case $action in
                '') words='check' ;;
                *) options+=' --profile -D -I' ;;
            esac ;;
        bench)
            case $action in
                '') words='kernels text' ;;
                text) options+=" $jobs -p -n -r" ;;
                *) options+=' --device --allow-software --op --quick' ;;
            esac ;;
        config)
            case $action in
                '') words='get set' ;;
                *) words=$(pvrctl "${buses[@]}" config get 2>/dev/null | sed 's/ = .*//') ;;
            esac ;;
    esac
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
    elif [[ $command == upscale || $command == compile || $command == export || $command == compare || $command == trace || $command == models && $action == add || $command == shader && -n $action ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
        compopt -o filenames 2>/dev/null
    else
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
    fi
}

complete -F _pvrctl pvrctl

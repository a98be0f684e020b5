# Completion of cgpu for fish: cgpu itself says what a word could become.
function __cgpu_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    test (count $current) -eq 0; and set current ''
    set -l program $words[1]
    set -e words[1]
    set -l found ($program __complete $words $current 2>/dev/null)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path $current
    end
end
complete -c cgpu -f -a '(__cgpu_complete)'

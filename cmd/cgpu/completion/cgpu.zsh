#compdef cgpu
# Completion of cgpu for zsh: cgpu itself says what a word could become.
_cgpu() {
	local line value
	local -a found
	while IFS= read -r line; do
		value=${line%%$'\t'*}
		found+=("${value//:/\\:}:${line#*$'\t'}")
	done < <(${~words[1]} __complete "${(@)words[2,CURRENT]}" 2>/dev/null)
	if (( $#found )); then
		_describe cgpu found
	else
		_files
	fi
}
if [[ $funcstack[1] == _cgpu ]]; then
	_cgpu "$@"
else
	compdef _cgpu cgpu
fi

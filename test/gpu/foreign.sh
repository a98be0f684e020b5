#!/usr/bin/env bash
# Others' programs and tests in a container with the bare GPU and in one on a vGPU, on a private node (run.sh). Every difference is
# printed, and a summary at the end. DIR has what the caller brings, any of:
#   cuda-samples/    NVIDIA's. Built by cmake if it has no folder build. Each program below it (executable, no dot in its name) runs in
#                    its own folder; its exit status is compared.
#   nccl-tests/      Built by make if it has no folder build. Each build/*_perf runs over all GPUs.
#   */pytest.args    A folder of Python tests, such as a checkout of CuPy's or cuda-python's; pytest runs there with the arguments in that
#                    file, one in each line. Every test is compared. If there is a program `prepare` beside it, that runs first, once.
# A difference counts if it is there again when its test runs once more, and foreign-known.txt does not have it. Exit status: 0 if none
# counts, 1 if one does or a suite gives no result, 2 if there is no suite.
#   OUT=FOLDER test/gpu/foreign.sh DIR
#   ONLY=REGEX   the suites whose names match
#   SIZE=S       of the vGPU (default 16GiB)
#   LIMIT=S      how long a program may take (default 120); a suite of pytest's: 10 times that
set -uo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

tests_of() { # tests_of SUITE: what of it can run, in its folder
	case $1 in
	cuda-samples) find . -type f -perm -u+x ! -name '*.*' ! -path '*/CMakeFiles/*' ;;
	nccl-tests) find build -maxdepth 1 -type f -name '*_perf' ;;
	esac | sort
}

# In the container: inside SUITE FOLDER [TESTS] writes a line for each test to FOLDER/results, NAME<tab>RESULT.
inside() {
	local name status arguments=() suite=$1 folder=$2 tests=${3:-}
	cd "$DIR/$suite" || exit 2
	if [[ -f pytest.args ]]; then
		[[ $tests ]] || tests=pytest.args
		FOREIGN_RESULTS=$folder/results PYTHONPATH=$here timeout -k 5 "$((10 * LIMIT))" "$PYTHON" -m pytest -p foreign_report \
			-p no:cacheprovider --rootdir . "@$tests" >"$folder/pytest.log" 2>&1
		return
	fi
	[[ $suite != nccl-tests ]] || arguments=(-b 1K -e 64M -f 8 -g "$GPUS")
	while read -r name; do
		(cd "$(dirname "$name")" && exec timeout -k 5 "$LIMIT" "./${name##*/}" "${arguments[@]}") >"$folder/${name##*/}.log" 2>&1 </dev/null
		status=$?
		printf '%s\texit %d\n' "$name" "$status" >>"$folder/results"
	done < <(if [[ $tests ]]; then cat "$tests"; else tests_of "$suite"; fi)
}

if [[ ${1:-} == --inside ]]; then
	inside "${@:2}"
	exit 0
fi
export DIR PYTHON LIMIT=${LIMIT:-120}
DIR=$(cd "${1:?usage: foreign.sh DIR}" && pwd) || exit 2
out=${OUT:?set OUT to a folder for the logs}/foreign
# shellcheck source=test/gpu/host.sh
source "$here/host.sh"
PYTHON=${PYTHON:-$python}
gpus=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU || true)
export GPUS=$((gpus > 0 ? gpus : 1))
export NCCL_NVLS_ENABLE=${NCCL_NVLS_ENABLE:-0} # virtual machines may lack multicast
settings=()
for name in DIR PYTHON LIMIT GPUS "${!NCCL_@}" "${!NVSHMEM_@}" "${!TORCH_@}"; do settings+=(-e "$name"); done
declare -A took=([bare]=0 [vgpu]=0)

# pass WAY SUITE FOLDER [TESTS]
pass() {
	local way=$1 begin=$EPOCHREALTIME start=(bare)
	[[ $way == bare ]] || start=(vgpu "${SIZE:-16GiB}" -e "ALIYUN_COM_GPU_VISIBLE_DEVICES=$(seq -s, 0 $((GPUS - 1)))")
	rm -rf "$3"
	mkdir -p "$3"
	"${start[@]}" --rm --shm-size 1g -e HOME=/tmp "${settings[@]}" -v "$DIR:$DIR" -v "$out:$out" -v "$here:$here:ro" -- \
		bash "$here/foreign.sh" --inside "${@:2}" >"$3/container.log" 2>&1
	took[$way]=$(awk -v t="${took[$way]}" -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN {printf "%.1f", t + b - a}')
}
# both SUITE FOLDER [TESTS]: writes FOLDER/differences, NAME<tab>BARE<tab>VGPU. Names are all that either has.
both() {
	pass bare "$1" "$2/bare" "${@:3}"
	pass vgpu "$1" "$2/vgpu" "${@:3}"
	awk -F '\t' 'FNR == 1 {file++} {result[file, $1] = $2; names[$1]}
		function of(i, name) {return (i, name) in result ? result[i, name] : "no result"}
		END {for (name in names) if (of(1, name) != of(2, name)) print name "\t" of(1, name) "\t" of(2, name)}' \
		<(echo; cat "$2/bare/results" 2>/dev/null) <(echo; cat "$2/vgpu/results" 2>/dev/null) | sort >"$2/differences"
}
result() { awk -F '\t' -v name="$1" '$1 == name {found = $2} END {print found ? found : "no result"}' "$2/results" 2>/dev/null || echo 'no result'; }
known() { # known SUITE NAME: prints the reason
	local suite pattern reason
	while read -r suite pattern reason; do
		# shellcheck disable=SC2053 # a pattern on purpose
		[[ $suite == "$1" && $2 == $pattern ]] && echo "$reason" && return
	done < <(grep -v '^#' "${KNOWN:-$here/foreign-known.txt}")
	return 1
}
build() { # build SUITE
	[[ ! -d $DIR/$1/build ]] || return 0
	case $1 in
	cuda-samples) cmake -S "$DIR/$1" -B "$DIR/$1/build" && cmake --build "$DIR/$1/build" -j "$(nproc)" -- -k ;;
	nccl-tests) make -C "$DIR/$1" -j "$(nproc)" ;;
	*) [[ ! -x $DIR/$1/prepare ]] || (cd "$DIR/$1" && ./prepare) ;;
	esac >"$out/$1/build.log" 2>&1 || echo "foreign: $1: not all of it could be built: $out/$1/build.log"
}

tests=0 suites=0 expected=0 differences=0 empty=0
compare() { # compare SUITE
	local way name bare vgpu bare_again vgpu_again reason ran folder=$out/$1
	both "$1" "$folder"
	ran=$(cat "$folder"/{bare,vgpu}/results 2>/dev/null | cut -f 1 | sort -u | wc -l)
	suites=$((suites + 1)) tests=$((tests + ran))
	echo "foreign: $1: $ran tests"
	for way in bare vgpu; do
		if [[ ! -s $folder/$way/results ]]; then
			empty=$((empty + 1))
			echo "FAIL  $1: $way gives no result:" && tail -qn 3 "$folder/$way"/*.log
			return
		fi
	done
	[[ -s $folder/differences ]] || return 0
	cut -f 1 "$folder/differences" >"$folder/again.txt"
	both "$1" "$folder/again" "$folder/again.txt"
	while IFS=$'\t' read -r name bare vgpu; do
		bare_again=$(result "$name" "$folder/again/bare") vgpu_again=$(result "$name" "$folder/again/vgpu")
		if [[ $bare_again == "$vgpu_again" && $bare_again != 'no result' ]]; then
			echo "once  $1 $name: bare $bare, vGPU $vgpu; the same when run again"
		elif reason=$(known "$1" "$name"); then
			expected=$((expected + 1))
			echo "known $1 $name: bare $bare, vGPU $vgpu ($reason)"
		else
			differences=$((differences + 1))
			echo "DIFF  $1 $name: bare $bare, vGPU $vgpu; again: bare $bare_again, vGPU $vgpu_again"
		fi
	done <"$folder/differences"
}

make_host_image || exit 1
for suite in cuda-samples nccl-tests $(cd "$DIR" && find . -mindepth 2 -maxdepth 2 -name pytest.args -printf '%h\n' | sort); do
	suite=${suite#./}
	[[ -z ${ONLY:-} || $suite =~ $ONLY ]] || continue
	if [[ ! -d $DIR/$suite ]]; then
		echo "foreign: no $suite in $DIR"
	elif [[ -f $DIR/$suite/pytest.args ]] && ! "$PYTHON" -c 'import pytest' 2>/dev/null; then
		echo "foreign: $suite left out: ${PYTHON:-python3} has no pytest"
	else
		mkdir -p "$out/$suite"
		build "$suite"
		compare "$suite"
	fi
done
echo "foreign: $tests tests of $suites suites: $differences differences, $expected known ones; bare ${took[bare]} s, vGPU ${took[vgpu]} s"
((suites > 0)) || exit 2
((differences + empty == 0))

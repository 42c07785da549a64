# shellcheck shell=bash
# Flags of the 20-layer model for other scripts, which source this file.

# with FLAG VALUE: another value than upstream's.
with() { list=$(sed -E "s/ --$1 [^ ]+/ --$1 $2/" <<<" $list"); }
# without FLAG...: what upstream's list has, and its value.
without() {
	local flag
	for flag; do list=$(sed -E "s/ --$flag( [^- ][^ ]*)?//" <<<" $list"); done
}

# twenty_layers LAYOUT STEPS [FLAG...]: sets `arguments`, the flags of mimo train; layouts are those of twenty_layers.sh.
twenty_layers() {
	local layout=$1 steps=$2 list gpus flag
	list=$(grep -v '^#' "$(dirname "${BASH_SOURCE[0]}")/../e2e/upstream-20l.txt" | tr '\n' ' ')
	without tensor-parallel-num-weight-shards expert-tensor-parallel-num-weight-shards
	with attention-backend fused
	with global-batch-size 4
	with eval-interval 1000
	with train-iters "$steps"
	with encoder-dp 1
	case $layout in
	tp2+tp2ep2) with llm-offset 2 ;;
	tp2dp2+tp2dp2ep2)
		with global-batch-size 8
		for flag in encoder-dp llm-dp; do with "$flag" 2; done
		;;
	language)
		without image-token-id dynamic-resolution pixel-shuffle disable-vision-class-token encoder-ddp-overlap
		without encoder-tp encoder-dp llm-offset
		list+=" --llm-only"
		;;
	dp2ep2 | language1)
		gpus=2
		[ "$layout" = dp2ep2 ] || gpus=1
		without image-token-id dynamic-resolution pixel-shuffle disable-vision-class-token encoder-ddp-overlap
		without encoder-tp encoder-dp llm-offset
		with llm-tp 1
		with llm-dp "$gpus"
		with llm-ep "$gpus"
		with num-experts $((32 * gpus))
		list+=" --llm-only"
		;;
	1+1)
		for flag in encoder-tp llm-offset llm-tp llm-ep; do with "$flag" 1; done
		with num-experts 64
		;;
	1 | 'dp2|dp2ep2' | 'dp4|dp4ep4')
		gpus=1
		[ "$layout" = 1 ] || gpus=${layout:2:1}
		for flag in encoder-tp llm-tp; do with "$flag" 1; done
		for flag in encoder-dp llm-dp llm-ep; do with "$flag" "$gpus"; done
		with llm-offset 0
		with num-experts $((32 * gpus))
		;;
	*)
		echo "$0: no layout $layout; there are tp2+tp2ep2, tp2dp2+tp2dp2ep2, language, dp2ep2, language1, 1+1, 1, dp2|dp2ep2 and dp4|dp4ep4." >&2
		exit 2
		;;
	esac
	read -ra arguments <<<"$list"
	arguments+=("${@:3}")
}

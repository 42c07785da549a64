/**
 * Nodes to which a token's row is sent, and the token's experts on each node (docs/spec/moe-performance.md §2.3). The routing travels
 * beside the row, one row of it for each node.
 */
import type { Tape } from "../tape.ts";
import { copyInto, Tensor } from "../tensor.ts";
import type { Routing } from "./router.ts";

export interface NodeSizes {
	readonly nodes: number;
	/** Experts of each node. */
	readonly nodeExperts: number;
}

export interface TokenNodes {
	/** i32 [T, min(K, nodes)]: each node once, then -1. */
	readonly nodeIndex: Tensor;
	/** f32 [T, 2 K]: indices of the experts, -1 for a dropped one, then their probabilities. Its gradient is that of the probabilities. */
	readonly routing: Tensor;
}

/** The choices of R received rows among the experts of one node. Rows from `rowCount` on are unused. */
export interface NodeExperts {
	/** i32 [R, K]: expert, counted from the node's first; -1: an expert of another node. */
	readonly expertIndex: Tensor;
	/** f32 [R, K]; 0 where the index is -1. */
	readonly probabilities: Tensor;
}

/** The nodes of each token's experts; expert e lies on node e / nodeExperts. */
export function tokenNodes(
	tape: Tape,
	{ expertIndex, probabilities }: Pick<Routing, "expertIndex" | "probabilities">,
	{ nodes, nodeExperts }: NodeSizes,
): TokenNodes {
	const { device } = tape;
	const [tokens, topk] = [expertIndex.rows, expertIndex.width];
	const slots = Math.min(topk, nodes);
	const nodeIndex = Tensor.empty(device, [tokens, slots], "i32");
	const routing = tape.output(Tensor.empty(device, [tokens, 2 * topk]), probabilities.gradient !== null);
	device.run("moe_token_nodes", {
		expert_index: expertIndex,
		probabilities,
		node_index: nodeIndex,
		routing,
		tokens,
		topk,
		nodes,
		node_experts: nodeExperts,
		node_slots: slots,
	});
	tape.record({
		name: "token nodes",
		outputs: [routing],
		backward: ([gradient]) => {
			const dprobabilities = probabilities.gradient!.contiguousTarget();
			using own = gradient!.columns(topk, topk);
			copyInto(own, dprobabilities);
			probabilities.gradient!.accumulate(dprobabilities);
		},
	});
	return { nodeIndex, routing };
}

/** The part of the routing that is for the `experts` experts from `firstExpert` on. */
export function nodeExperts(
	tape: Tape,
	routing: Tensor,
	options: { readonly rowCount: Tensor | null; readonly firstExpert: number; readonly experts: number },
): NodeExperts {
	const { device } = tape;
	const { rowCount, firstExpert, experts } = options;
	const [rows, topk] = [routing.rows, routing.width / 2];
	const expertIndex = Tensor.empty(device, [rows, topk], "i32");
	const probabilities = tape.output(Tensor.empty(device, [rows, topk]), routing.gradient !== null);
	device.run("moe_node_experts", {
		routing,
		row_count: rowCount,
		expert_index: expertIndex,
		probabilities,
		rows,
		topk,
		first_expert: firstExpert,
		experts,
	});
	tape.record({
		name: "node experts",
		outputs: [probabilities],
		// Choices of other nodes have no row here, and so no gradient.
		backward: ([gradient]) => {
			const drouting = routing.gradient!.contiguousTarget();
			device.setZero(drouting, drouting.bytes);
			using own = drouting.columns(topk, topk);
			copyInto(gradient!, own);
			routing.gradient!.accumulate(drouting);
		},
	});
	return { expertIndex, probabilities };
}

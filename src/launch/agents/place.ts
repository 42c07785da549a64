/** The place of an agent among those that an engine has started: one a host, or one in the place of each rank. */
import type { NodePlace } from "../node.ts";
import { type Place, placeFromEnvironment } from "../place.ts";
import { secretFromEnvironment } from "../secret.ts";

export interface AgentPlace
	extends Pick<Place, "address" | "fallbackAddress" | "port" | "secret" | "localRank" | "localSize"> {
	/** Its number, and that of all agents. */
	readonly agent: number;
	readonly agents: number;
	/** Ranks that it starts. */
	readonly seats: number;
	/** The engine's name of the host. */
	readonly node: string;
}

/** null: this process launches its ranks itself, or is a rank that an agent or a launcher has started. */
export function agentFromEnvironment(node: NodePlace | null, environment = process.env): AgentPlace | null {
	if (node !== null) {
		const { node: agent, nodes: agents, ranksPerNode: seats, address, port } = node;
		const secret = secretFromEnvironment(environment, "");
		return { agent, agents, seats, localRank: 0, localSize: seats, node: String(agent), address, port, secret };
	}
	const place = placeFromEnvironment(environment);
	if (place === null || place.launcher !== null || place.restarts !== undefined) return null;
	const { rank, worldSize, localSize } = place;
	return {
		...place,
		agent: rank,
		agents: worldSize,
		seats: 1,
		node: place.node ?? String(Math.floor(rank / localSize)),
	};
}

/** Checks the limit of open files against the connections that rank 0 of several hosts holds in the rendezvous. */
import { readFileSync } from "node:fs";
import { UserError } from "../system/errors.ts";
import type { Place } from "./place.ts";

/** Descriptors that a process needs besides: its files and pipes, unproven connections, and a margin. */
const besides = 64;

/** Connections that rank 0 holds while ranks join: one of each other host, and one of each rank of its own. */
export function connectionsOf({ localSize, worldSize }: Pick<Place, "localSize" | "worldSize">): number {
	return Math.ceil(worldSize / localSize) - 1 + localSize - 1;
}

/**
 * Throws a UserError if the system allows this process too few descriptors. Bun has raised the limit to the allowed maximum.
 * `limits`: the text of /proc/self/limits; unknown limits are accepted.
 */
export function requireDescriptors(place: Pick<Place, "localSize" | "worldSize">, limits = readLimits()): void {
	const allowed = Number(/^Max open files\s+(\d+)/m.exec(limits)?.[1] ?? Number.POSITIVE_INFINITY);
	const needed = connectionsOf(place) + besides;
	if (allowed >= needed) return;
	throw new UserError(
		`Rank 0 needs ${needed} descriptors for the connections of the others, and the system allows ${allowed}: raise the hard limit of ulimit -n on its host.`,
	);
}

function readLimits(): string {
	try {
		return readFileSync("/proc/self/limits", "utf8");
	} catch {
		return "";
	}
}

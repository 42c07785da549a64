/** Whether rank 0 may hold the connections of all that meet it. */
import { readFileSync } from "node:fs";
import { UserError } from "../native/errors.ts";
import type { Place } from "./place.ts";

/** Descriptors of a process besides: its files, pipes, strangers at its port, and some to spare. */
const besides = 64;

/** Connections to rank 0 of several hosts while ranks meet: one of each other host, and of its neighbours. */
export function connectionsOf({ localSize, worldSize }: Pick<Place, "localSize" | "worldSize">): number {
	return Math.ceil(worldSize / localSize) - 1 + localSize - 1;
}

/**
 * Throws a UserError where the system allows this process too few descriptors. Bun has raised the limit to what is allowed.
 * `limits`: the text of /proc/self/limits; where it says nothing, nothing is wrong.
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

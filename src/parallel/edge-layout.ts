/**
 * Which ranks exchange rows over an edge, between an encoder and a language model or between two pipeline stages. Both sides take
 * microbatches in lanes; the ranks of a lane hold equal rows, or each a run of them. A rank receives from the rank at its own
 * position in each lane that has rows for it; rows that it holds already are not transferred.
 */

/** Ranks of each lane of both sides, ascending within a lane. */
export interface EdgeLayout {
	readonly from: readonly (readonly number[])[];
	readonly to: readonly (readonly number[])[];
}

/** Lane `source` of one side sends rows to lane `destination` of the other. */
export interface Route {
	readonly source: number;
	readonly destination: number;
}

/** One transfer of a microbatch, from the view of one rank. */
export interface Link {
	/** Rank at the other end; may be this rank. */
	readonly peer: number;
	/** Index of the part that is sent, of `parts` equal parts of this rank's samples. */
	readonly part: number;
	readonly parts: number;
}

/** The transfers of one rank in one direction, for every microbatch. */
export interface Links {
	/** Transfers to each lane; the ranks of a lane get the same part. */
	readonly sends: readonly Link[];
	/** Transfers from each lane, in the order of their rows. */
	readonly receives: readonly Link[];
}

/** The edge in the other direction. */
export function reversed({ from, to }: EdgeLayout): EdgeLayout {
	return { from: to, to: from };
}

/** All ranks of both sides, ascending. */
export function ranksOf({ from, to }: EdgeLayout): number[] {
	return [...new Set([...from.flat(), ...to.flat()])].sort((a, b) => a - b);
}

/** The links of `rank`. */
export function linksOf({ from, to }: EdgeLayout, rank: number): Links {
	const sends: Link[] = [];
	const receives: Link[] = [];
	const routes = routesBetween(from.length, to.length);
	for (const { source, destination } of routes) {
		const served = routes.filter((route) => route.source === source);
		const serving = routes.filter((route) => route.destination === destination);
		const part = served.findIndex((route) => route.destination === destination);
		const place = serving.findIndex((route) => route.source === source);
		const [holders, takers] = [from[source]!, to[destination]!];
		takers.forEach((taker, index) => {
			const holder = holders.includes(taker) ? taker : holders[index % holders.length]!;
			if (holder === rank) sends.push({ peer: taker, part, parts: served.length });
			if (taker === rank) receives.push({ peer: holder, part: place, parts: serving.length });
		});
	}
	return { sends, receives };
}

/** Routes in which each lane of the smaller side serves the same number of lanes of the larger side. */
export function routesBetween(sources: number, destinations: number): Route[] {
	const fanOut = destinations >= sources;
	const factor = fanOut ? destinations / sources : sources / destinations;
	return Array.from({ length: Math.max(sources, destinations) }, (_, index) =>
		fanOut
			? { source: Math.floor(index / factor), destination: index }
			: { source: index, destination: Math.floor(index / factor) },
	);
}

/** Whether each lane of one side can serve the same number of lanes of the other. */
export function lanesNest(sources: number, destinations: number): boolean {
	return sources % destinations === 0 || destinations % sources === 0;
}

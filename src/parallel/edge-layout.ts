/**
 * An edge joins two sides that take microbatches in lanes: an encoder and a language model, or two stages of one model.
 * Ranks of a lane hold the same rows, or each a run of them. From every lane of the other side that has rows for it, a
 * rank receives the rows of the rank at its own place in that lane; rows that it holds itself are not transferred.
 */

/** Ranks of every lane of both sides, ascending in a lane. */
export interface EdgeLayout {
	readonly from: readonly (readonly number[])[];
	readonly to: readonly (readonly number[])[];
}

/** Lane `source` of one side and lane `destination` of the other exchange rows. */
export interface Route {
	readonly source: number;
	readonly destination: number;
}

/** A transfer of a microbatch, from the view of the rank at one end. */
export interface Link {
	/** Rank at the other end; may be this rank itself. */
	readonly peer: number;
	/** Index of the carried part, of `parts` equal parts of this rank's samples. */
	readonly part: number;
	readonly parts: number;
}

/** The transfers of one rank in one direction, for every microbatch. */
export interface Links {
	/** Equal parts go to different lanes; several ranks of a lane get the same part. */
	readonly sends: readonly Link[];
	/** In the order of their rows. */
	readonly receives: readonly Link[];
}

/** The way back: from the receiving side to the sending one. */
export function reversed({ from, to }: EdgeLayout): EdgeLayout {
	return { from: to, to: from };
}

/** Every rank of both sides, ascending. */
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

/** Each lane of the side with fewer serves equally many neighbours of the other side. */
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

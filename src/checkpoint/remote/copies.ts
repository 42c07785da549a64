/** The copies on this host of what is in stores: by which path a URL is read. */
import { UserError } from "../../system/errors.ts";

/** What a copy is of, and where it is. */
export interface Wanted {
	readonly url: string;
	/** --staging-dir. */
	readonly staging: string | null;
	/** Of a checkpoint of ours; null: the newest. */
	readonly iteration: number | null;
}

/** What a path stands for is in a store, and this process has not brought it. */
export class CopyMissing extends UserError {
	constructor(readonly wanted: Wanted) {
		super(`${wanted.url} is in a store, and its copy on this host is gone.`);
	}
}

/** Those that this process has brought, or its launcher for it. */
const copies: { readonly url: string; readonly iteration: number | null; readonly path: string }[] = [];

export function addCopy({ url, iteration }: Wanted, path: string): string {
	copies.push({ url, iteration, path });
	return path;
}

/** Path of a copy; undefined: this process knows of none. */
export function copyOf({ url, iteration }: Wanted): string | undefined {
	return copies.findLast((copy) => copy.url === url && copy.iteration === iteration)?.path;
}

/** A text in which the paths of copies are the URLs that they stand for. */
export function withAddresses(text: string): string {
	return copies.reduce((all, { path, url }) => all.replaceAll(path, url), text);
}

/** How context parallelism deals out the heads of layers that mix tokens. */

/**
 * Whether `heads` heads, which read `groups` shared ones in order, can be dealt to `size` ranks: equally many to each, of whole groups
 * or of one that several ranks hold.
 */
export function dealsHeads(
	{ heads, groups }: { readonly heads: number; readonly groups: number },
	size: number,
): boolean {
	return heads % size === 0 && (groups % size === 0 || size % groups === 0);
}

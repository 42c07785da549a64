import type { Series } from "../series.ts";

type Bins = Series["bins"];

const of = (bins: Bins): number =>
	bins.reduce((sum, bin) => sum + bin.sum, 0) / bins.reduce((sum, bin) => sum + bin.count, 0);

/** Mean of a series; NaN without values. */
export const meanOf = ({ bins }: Series): number => of(bins);

/** Mean of the last bins, the current value of a curve. */
export const recentOf = (series: Series | undefined): number => of(series?.bins.slice(-8) ?? []);

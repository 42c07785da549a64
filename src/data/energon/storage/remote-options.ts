/** How remote files are fetched, as plain values that can be sent to other threads. */
export interface RemoteOptions {
	/** Parent of the disk cache's folder, which the processes of a user on a host share. */
	readonly cacheFolder: string;
	/** Most bytes of the disk cache. */
	readonly cacheBytes: number;
	/** Bytes fetched at once. */
	readonly blockBytes: number;
	/** Blocks fetched ahead of the one that is read. */
	readonly readAhead: number;
	/** Number of attempts of a read, and the pause after the first attempt, which doubles after each. */
	readonly attempts: number;
	readonly backoffMilliseconds: number;
	/** Milliseconds without data after which a connection counts as failed. */
	readonly stallMilliseconds: number;
	/** Milliseconds after which a piece of a file, all attempts included, or a read of a local file counts as stuck. */
	readonly timeoutMilliseconds: number;
	/** Follow redirects to other hosts inside the user's own network. */
	readonly privateRedirects: boolean;
}

/** The version of a file at its opening. */
export interface RemoteVersion {
	readonly url: string;
	readonly size: number;
	/** The server's ETag or Last-Modified header; null: the server sends neither. */
	readonly etag: string | null;
	/** Name of the version in the cache: the tag, or a random name of this run. */
	readonly cacheName: string;
}

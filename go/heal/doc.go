// Package heal moves the memory of one replica group's state into the memory of another's, over several TCP streams.
//
// A source offers some regions of memory. Laid end to end they are one range of bytes, cut into blocks of one size: a
// large region is many blocks, and many small ones share a block. A target asks for blocks, each on whichever stream is
// free, and reads them straight to where they belong. Every block carries a CRC32C; a block that fails it, or was on a
// stream that broke, is asked for again, of any source that has the same bytes.
//
// What the memory means (shapes, names, plain values) is Python's business and travels before, with the secret that
// opens a data connection.
package heal

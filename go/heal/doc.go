// Package heal moves the memory of one replica group's state into the memory of another's, over several TCP
// streams.
//
// A source offers regions of memory. Concatenated, they form one range of bytes, which is cut into blocks of
// equal size: a large region spans many blocks, and many small ones share a block. A target requests each
// block on a free stream, and reads it directly into its final place. Every block carries a CRC32C. If the
// checksum is wrong, or the stream breaks, the block is requested again from any source that has the same
// bytes.
//
// The meaning of the memory (shapes, names, plain values) is known to Python only. Python sends it before the
// transfer, together with the secret that opens a data connection.
package heal

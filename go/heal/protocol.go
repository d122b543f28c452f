package heal

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"time"
)

// A connection begins with the target's hello: magic and secret. Then the target sends requests, and the
// source answers them in their order. All numbers are little-endian.
const (
	magic      = "tftheal1"
	secretSize = 16
	helloSize  = len(magic) + secretSize

	requestSize  = 16 // operation, block, expected, flags
	responseSize = 16 // status, block, length, checksum of the three
)

// The operations of a request.
const (
	opBlock uint32 = 1 + iota // the bytes of a block and their checksum
	// The same, if the block has the expected checksum; sent to additional sources, see stream.receive.
	opEqual
	opSums // the checksums of `expected` blocks from `block` on
)

const flagChecksum uint32 = 1

// The status of a response. The header of a response is followed by `length` bytes and their CRC32C. The
// CRC32C is missing if there are no bytes, and after the bytes of a block if the request lacks flagChecksum.
const (
	statusOK        uint32 = 0x4b4f4b4f
	statusDiffer    uint32 = 0x46464944
	statusWithdrawn uint32 = 0x454e4f47 // the offer has ended; the bytes are the reason as text
	// Too many connections: connect again after `block` milliseconds. The source closes this one.
	statusBusy uint32 = 0x59535542
)

type request struct{ op, block, expected, flags uint32 }

func (r request) append(to []byte) []byte {
	for _, word := range []uint32{r.op, r.block, r.expected, r.flags} {
		to = binary.LittleEndian.AppendUint32(to, word)
	}
	return to
}

func parseRequest(b []byte) request {
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) }
	return request{word(0), word(1), word(2), word(3)}
}

type response struct{ status, block, length uint32 }

func (r response) append(to []byte) []byte {
	start := len(to)
	for _, word := range []uint32{r.status, r.block, r.length} {
		to = binary.LittleEndian.AppendUint32(to, word)
	}
	return binary.LittleEndian.AppendUint32(to, checksum(to[start:]))
}

// errGarbled reports data whose checksum is wrong: it changed on the way.
var errGarbled = errors.New("the data was garbled on its way")

// parseResponse returns an error if the response is garbled or, a busyError, the source is busy.
func parseResponse(b []byte) (response, error) {
	word := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) }
	if word(3) != checksum(b[:12]) {
		return response{}, fmt.Errorf("header of a block: %w", errGarbled)
	}
	if word(0) == statusBusy {
		return response{}, busyError{min(time.Duration(word(1))*time.Millisecond, longestRetryAfter)}
	}
	return response{word(0), word(1), word(2)}, nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// digest returns a hash of a whole state: of the sizes of its regions, the block size, and the checksum of
// each block.
func digest(l *Layout, crcs []uint32) string {
	sum := sha256.New()
	words := []uint64{uint64(l.Total), uint64(l.BlockSize), uint64(len(l.sizes))}
	for _, size := range l.sizes {
		words = append(words, uint64(size))
	}
	_ = binary.Write(sum, binary.LittleEndian, words)
	_ = binary.Write(sum, binary.LittleEndian, crcs)
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

func updateChecksum(crc uint32, b []byte) uint32 { return crc32.Update(crc, castagnoli, b) }

func appendSums(to []byte, crcs []uint32) []byte {
	for _, crc := range crcs {
		to = binary.LittleEndian.AppendUint32(to, crc)
	}
	return to
}

package heal

import (
	"fmt"
	"math"
	"sort"
)

const (
	minBlock = 256 << 10
	maxBlock = 4 << 20
	// A stream should carry at least bytesPerStream. More than maxStreams are no faster on one network card.
	bytesPerStream  = 8 << 20
	maxStreams      = 8
	blocksPerStream = 8
)

// Layout maps blocks to bytes of regions. The regions are laid end to end, and the whole is cut into blocks
// of one size.
type Layout struct {
	Total     int64
	BlockSize int64
	starts    []int64 // where each region begins in the range of all bytes
	sizes     []int64
}

// Span is a part of a region.
type Span struct {
	Region int
	Offset int64
	Length int64
}

// NewLayout lays regions of these sizes end to end. A blockSize of 0 is chosen from the size of the data.
func NewLayout(sizes []int64, blockSize int64) (Layout, error) {
	l := Layout{sizes: sizes, starts: make([]int64, len(sizes))}
	for i, size := range sizes {
		if size < 0 || size > math.MaxInt64-l.Total {
			return Layout{}, fmt.Errorf(
				"region %d has %d bytes: allowed are 0 and more, and fewer than 2^63 in all", i, size)
		}
		l.starts[i] = l.Total
		l.Total += size
	}
	if blockSize == 0 {
		blockSize = min(maxBlock, max(minBlock, l.Total/(maxStreams*blocksPerStream)>>16<<16))
	}
	if blockSize < 1 || blockSize > 1<<30 {
		return Layout{}, fmt.Errorf("block_size is %d: allowed are 1 to %d bytes", blockSize, 1<<30)
	}
	l.BlockSize = blockSize
	if l.Total/blockSize >= math.MaxUint32 {
		return Layout{}, fmt.Errorf("block_size is %d: too small for %d bytes", blockSize, l.Total)
	}
	return l, nil
}

// Blocks returns the number of blocks.
func (l *Layout) Blocks() int { return int((l.Total + l.BlockSize - 1) / l.BlockSize) }

// Streams returns the number of streams to use.
func (l *Layout) Streams() int {
	return int(max(1, min(maxStreams, (l.Total+bytesPerStream-1)/bytesPerStream)))
}

// Length returns the number of bytes of a block; only the last block may be shorter than the others.
func (l *Layout) Length(block int) int64 {
	return min(l.BlockSize, l.Total-int64(block)*l.BlockSize)
}

// Spans appends the parts of a block, in order, none of them empty.
func (l *Layout) Spans(block int, spans []Span) []Span {
	at := int64(block) * l.BlockSize
	end := at + l.Length(block)
	// the last region that begins at or before the block; empty regions before it may begin at the same byte
	region := sort.Search(len(l.starts), func(i int) bool { return l.starts[i] > at }) - 1
	for ; at < end; region++ {
		offset := at - l.starts[region]
		if length := min(l.sizes[region]-offset, end-at); length > 0 {
			spans = append(spans, Span{region, offset, length})
			at += length
		}
	}
	return spans
}

const (
	// checkedSize is the size of pieces with checksums. The checksum is computed right before or after the
	// copy into or out of the kernel. So a piece must fit into a core's cache, and be large enough for the
	// system calls to cost little (0.48 s of processor time per GB; 0.55 with 256 KB).
	checkedSize = 1 << 20
	// pieceSize is the size of pieces into which small spans are packed.
	pieceSize = 256 << 10
	// packBelow is the size below which spans are packed: a system call for each would cost more.
	packBelow = 16 << 10
)

// pieces calls yield once for each system call that moves the spans: with a part of one large span, of at
// most largest bytes, or with several small spans of at most pieceSize bytes together.
func pieces(spans []Span, largest int64, yield func(piece []Span, length int64) error) error {
	for i := 0; i < len(spans); {
		if spans[i].Length >= packBelow {
			for rest := spans[i]; rest.Length > 0; {
				part := rest
				part.Length = min(rest.Length, largest)
				if err := yield([]Span{part}, part.Length); err != nil {
					return err
				}
				rest.Offset += part.Length
				rest.Length -= part.Length
			}
			i++
			continue
		}
		length, first := int64(0), i
		for ; i < len(spans) && spans[i].Length < packBelow && length+spans[i].Length <= pieceSize; i++ {
			length += spans[i].Length
		}
		if err := yield(spans[first:i], length); err != nil {
			return err
		}
	}
	return nil
}

// largestPiece returns the largest part of a span that one system call moves. Without checksums it is as
// large as the largest block that NewLayout chooses, which saves a tenth of the time.
func largestPiece(checked bool) int64 {
	if checked {
		return checkedSize
	}
	return maxBlock
}

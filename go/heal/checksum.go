package heal

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash/crc32"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// digest is a hash of a whole state: of the sizes of its regions, the block size, and the checksum of each block.
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

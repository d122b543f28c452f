package pyapi

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/torchftpb"
)

// Requests and results pass between Go and Python as JSON, by the names of their fields.
func TestPythonHasEachFieldOfARound(t *testing.T) {
	records, err := os.ReadFile("../../torchft/_records.py")
	require.NoError(t, err)
	for class, message := range map[string]proto.Message{
		"QuorumRequest": &torchftpb.ManagerQuorumRequest{}, "QuorumResult": &torchftpb.ManagerQuorumResponse{},
	} {
		_, body, _ := strings.Cut(string(records), "\nclass "+class+":\n")
		body, _, _ = strings.Cut(body, "\nclass ")
		fields := message.ProtoReflect().Descriptor().Fields()
		for i := range fields.Len() {
			assert.Contains(t, body, "\n    "+string(fields.Get(i).Name())+": ", class)
		}
	}
}

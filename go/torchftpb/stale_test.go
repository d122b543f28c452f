package torchftpb_test

import (
	"context"
	"testing"

	"github.com/bufbuild/protocompile"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/torchft/torchft/go/torchftpb"
)

// The descriptor in the generated code equals that of proto/torchft.proto. Comments and formatting are not
// compared.
func TestGeneratedCodeIsNotStale(t *testing.T) {
	compiler := protocompile.Compiler{Resolver: protocompile.WithStandardImports(
		&protocompile.SourceResolver{ImportPaths: []string{"../../proto"}},
	)}
	files, err := compiler.Compile(context.Background(), "torchft.proto")
	require.NoError(t, err)

	source := protodesc.ToFileDescriptorProto(files[0])
	generated := protodesc.ToFileDescriptorProto(torchftpb.File_torchft_proto)
	require.True(t, proto.Equal(source, generated),
		"proto/torchft.proto changed: run `make proto`\nproto:\n%s\ngenerated:\n%s", text(source),
		text(generated))
}

func text(d *descriptorpb.FileDescriptorProto) string {
	return prototext.MarshalOptions{Multiline: true}.Format(d)
}

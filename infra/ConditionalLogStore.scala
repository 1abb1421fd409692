package opd

import java.io.{ByteArrayOutputStream, IOException}
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.FileAlreadyExistsException
import java.util.Arrays

import org.apache.hadoop.conf.Configuration
import org.apache.hadoop.fs.{FSDataOutputStream, FileSystem, Path}

/** Delta's log in S3, where of two commits of one version exactly one succeeds, whoever else writes.
  *
  * The store that it extends looks whether the entry exists and then writes it, so that a committer which was paused
  * in between overwrites another's commit. Here the entry is created by one PUT with If-None-Match.
  */
class ConditionalLogStore(initial: Configuration) extends io.delta.storage.S3SingleDriverLogStore(initial) {

  override def write(
      path: Path,
      actions: java.util.Iterator[String],
      overwrite: java.lang.Boolean,
      configuration: Configuration
  ): Unit =
    if (overwrite) super.write(path, actions, overwrite, configuration)
    else {
      val bytes = new ByteArrayOutputStream
      while (actions.hasNext) bytes.write((actions.next() + "\n").getBytes(UTF_8))
      create(path.getFileSystem(configuration), path, bytes.toByteArray)
    }

  private def create(files: FileSystem, path: Path, entry: Array[Byte]): Unit =
    try {
      val builder = files.createFile(path)
      builder.must("fs.option.create.conditional.overwrite", true)
      val out = builder.build().asInstanceOf[FSDataOutputStream]
      out.write(entry)
      out.close()
    } catch {
      // The SDK retries by itself: a refusal may be the answer to our own first try. Entries name their transaction,
      // so the same bytes are ours.
      case failure: IOException =>
        if (!files.exists(path)) throw failure
        if (!Arrays.equals(content(files, path), entry)) throw new FileAlreadyExistsException(path.toString)
    }

  private def content(files: FileSystem, path: Path): Array[Byte] = {
    val in = files.open(path)
    try in.readAllBytes()
    finally in.close()
  }
}
